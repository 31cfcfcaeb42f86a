// The network and the collectives on it: rates of groups inside and across NVLink domains, worked out by hand.
#include "planner/base/error.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/routing.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/collective.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>

namespace {

moe::cost::GroupLinks links(const moe::machine::Hardware& hardware, moe::cost::Placement placement,
                            double efficiency = 1.0) {
    const moe::cost::Routes routes(hardware);
    return {placement, routes.of(placement), hardware.nvlink, hardware.pcie, hardware.nic, efficiency};
}

moe::model::Moe deepseek() { return *moe::families::load_model("DeepSeek-V3").kinds[1].moe; }

} // namespace

TEST_CASE("placement counts domains, and a job uses 64 of the 72 GPUs of a domain") {
    const moe::machine::Hardware h100 = moe::machine::load_hardware("h100"),
                                 gb200 = moe::machine::load_hardware("gb200-nvl72");
    CHECK(moe::cost::domain_of_job(h100, 1024) == 8);
    CHECK(moe::cost::domain_of_job(h100, 4) == 4);
    CHECK(moe::cost::domain_of_job(gb200, 256) == 64);
    CHECK(moe::cost::domain_of_job(gb200, 72) == 72);
    CHECK(moe::cost::domain_of_job(gb200, 96) == 48);
    CHECK(moe::cost::place({0, 1, 2, 3}, 8, 8) == moe::cost::Placement{4, 1, 4});
    CHECK(moe::cost::place({0, 8, 16, 24}, 8, 8) == moe::cost::Placement{4, 4, 1});
    CHECK(moe::cost::place({0, 4, 8, 12}, 8, 8) == moe::cost::Placement{4, 2, 2});
    CHECK(moe::cost::place({0, 4, 8, 12}, 8, 4) == moe::cost::Placement{4, 2, 2}); // a tray of NVL72 is no unit
    for (const int gpus : {4, 8, 96, 1024})
        CHECK(moe::cost::node_of_job(h100, gpus) == moe::cost::domain_of_job(h100, gpus));
    for (const int gpus : {72, 96, 256})
        CHECK(moe::cost::node_of_job(gb200, gpus) == moe::cost::domain_of_job(gb200, gpus));
}

TEST_CASE("a node of several NVLink domains: who reaches whom over PCIe") {
    const moe::machine::Hardware pairs = moe::machine::load_hardware("a100-pcie"), // domains of 2 in nodes of 8
        cards = moe::machine::load_hardware("l40s");                               // no NVLink, nodes of 8
    CHECK(moe::cost::domain_of_job(pairs, 16) == 2);
    CHECK(moe::cost::node_of_job(pairs, 16) == 8);
    CHECK(moe::cost::node_of_job(pairs, 6) == 6);
    CHECK(moe::cost::node_of_job(pairs, 12) == 6); // nodes are filled evenly
    CHECK(moe::cost::node_of_job(pairs, 7) == 7);  // and so are pairs: none of 7
    CHECK(moe::cost::node_of_job(cards, 20) == 5);
    CHECK(moe::cost::place({0, 1, 2, 3}, 2, 8) == moe::cost::Placement{4, 2, 2, 1, 4});
    CHECK(moe::cost::place({0, 2, 4, 6}, 2, 8) == moe::cost::Placement{4, 4, 1, 1, 4});
    CHECK(moe::cost::place({0, 4, 8, 12}, 2, 8) == moe::cost::Placement{4, 4, 1, 2, 2});
    CHECK(moe::cost::Placement{4, 4, 1, 2, 2}.domains_per_node() == 2);
}

TEST_CASE("routes over PCIe: a GPU's own link carries its node's messages and those to its NIC") {
    const moe::machine::Hardware cards = moe::machine::load_hardware("l40s"); // PCIe 24 GB/s, NIC 6.25 GB/s
    const moe::cost::Placement node{8, 8, 1, 1, 8}, two{16, 16, 1, 2, 8};
    CHECK(moe::cost::exchange_route(cards, node).bandwidth == nearly(24e9));
    CHECK(moe::cost::exchange_route(cards, node).latency == nearly(cards.pcie.latency));
    CHECK(moe::cost::ring_route(cards, node).bandwidth == nearly(24e9));
    CHECK(moe::cost::pair_route(cards, {2, 2, 1, 1, 2}).bandwidth == nearly(24e9));
    CHECK(moe::cost::pair_route(cards, {2, 2, 1}).bandwidth == nearly(6.25e9));
    // 8 of 15 messages leave the node over a quarter of the link's rate.
    CHECK(moe::cost::exchange_route(cards, two).bandwidth == nearly(6.25e9 * 15 / 8));
    CHECK(moe::cost::exchange_route(cards, two).latency == nearly(cards.nic.latency));
    // With a NIC of the same rate, all 15 pass the GPU's own link.
    moe::machine::Hardware wide = cards;
    wide.nic.bandwidth = 24e9;
    CHECK(moe::cost::exchange_route(wide, two).bandwidth == nearly(24e9));
    // Eight rings over eight NICs: 50 GB/s, more than PCIe passes on.
    CHECK(moe::cost::ring_route(cards, two).bandwidth == nearly(24e9));

    const moe::machine::Hardware pairs = moe::machine::load_hardware("a100-pcie"); // NVLink 300, PCIe 24, NIC 25 GB/s
    const moe::cost::Placement bridged{8, 4, 2, 1, 8};
    CHECK(moe::cost::pair_route(pairs, {2, 1, 2}).bandwidth == nearly(300e9));
    // 6 of 7 messages leave the pair.
    CHECK(moe::cost::exchange_route(pairs, bridged).bandwidth == nearly(24e9 * 7 / 6));
    // Two rings cross between pairs over two links.
    CHECK(moe::cost::ring_route(pairs, bridged).bandwidth == nearly(48e9));
    moe::machine::Hardware lonely = cards;
    lonely.pcie.bandwidth = 0.0;
    CHECK_THROWS_AS(moe::cost::exchange_route(lonely, node), moe::Error);
}

TEST_CASE("collectives over PCIe lie between those over NVLink and those over the network") {
    moe::machine::Hardware h = moe::machine::load_hardware("h100");
    h.pcie = {50e9, 5e-6};
    h.nic.bandwidth = 12.5e9;
    const double bytes = 1e9;
    const auto seconds = [&](moe::cost::Placement p) {
        const moe::cost::GroupLinks g = links(h, p);
        return std::array{moe::cost::all_gather_seconds(g, bytes), moe::cost::all_to_all_seconds(g, bytes),
                          moe::cost::ring_step_seconds(g, bytes), moe::cost::pair_seconds(g, bytes),
                          moe::cost::token_exchange_seconds(g, {}, bytes, deepseek())};
    };
    const auto over_nvlink = seconds({8, 1, 8}), over_pcie = seconds({8, 8, 1, 1, 8}), over_nic = seconds({8, 8, 1});
    for (std::size_t i = 0; i < over_nvlink.size(); ++i) {
        CAPTURE(i);
        CHECK(over_nvlink[i] < over_pcie[i]);
        CHECK(over_pcie[i] < over_nic[i]);
    }
}

// crazyguitar/aws-gpu-communication-benchmark fd167f97, data/nccl_alltoall.csv and nccl_all_gather.csv: NCCL over EFA
// of p5.48xlarge, bytes over the algorithm's bandwidth; efficiencies are those that the stacks' coefficients are near.
TEST_CASE("all-to-all and all-gather over EFA within a third, and slower by their messages") {
    struct Row {
        int nodes;
        double mebibytes, gigabytes_per_second;
    };
    const moe::machine::Hardware efa = moe::machine::load_hardware("h100-efa"),
                                 infiniband = moe::machine::load_hardware("h100");
    const auto at = [](int nodes) { return moe::cost::Placement{8 * nodes, nodes, 8}; };
    for (const Row& row : {Row{8, 64, 35.24}, Row{8, 512, 47.31}, Row{16, 64, 26.29}, Row{16, 512, 40.39},
                           Row{32, 64, 23.01}, Row{32, 512, 33.19}}) {
        CAPTURE(row.nodes);
        CAPTURE(row.mebibytes);
        const double bytes = row.mebibytes * 1048576.0, published = bytes / (row.gigabytes_per_second * 1e9);
        const double priced = moe::cost::all_to_all_seconds(links(efa, at(row.nodes), 0.85), bytes);
        CHECK(std::abs(priced / published - 1.0) < 0.33);
        CHECK(priced > moe::cost::all_to_all_seconds(links(infiniband, at(row.nodes), 0.85), bytes));
    }
    // 64 MiB over 16 and 32 nodes (47.36, 25.06 GB/s) are priced 48 and 70 % too fast, as a tree: NCCL takes a ring.
    for (const Row& row : {Row{8, 64, 88.17}, Row{8, 2048, 298.37}, Row{16, 2048, 267.24}, Row{32, 2048, 263.80}}) {
        CAPTURE(row.nodes);
        CAPTURE(row.mebibytes);
        const double bytes = row.mebibytes * 1048576.0, published = bytes / (row.gigabytes_per_second * 1e9);
        const double priced = moe::cost::all_gather_seconds(links(efa, at(row.nodes), 0.8), bytes);
        CHECK(std::abs(priced / published - 1.0) < 0.33);
    }
    // Within a node no message takes the network.
    CHECK(moe::cost::all_to_all_seconds(links(efa, {8, 1, 8}, 0.85), 1e8) ==
          nearly(moe::cost::all_to_all_seconds(links(infiniband, {8, 1, 8}, 0.85), 1e8)));
}

TEST_CASE("token dispatchers over a network with a time for each message are named as not priced") {
    moe::plan::Plan plan;
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h100-efa"));
    plan.gpus = 32, plan.dp = 32, plan.ep = 16, plan.edp = 2;
    plan.dispatcher = moe::plan::Dispatcher::deepep;
    CHECK(moe::cost::unpriced(plan).find("dispatcher deepep: over the network of h100-efa") == 0);
    plan.ep = 8, plan.edp = 4; // within a node
    CHECK(moe::cost::unpriced(plan).empty());
    plan.ep = 16, plan.edp = 2, plan.dispatcher = moe::plan::Dispatcher::alltoall;
    CHECK(moe::cost::unpriced(plan).empty());
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    CHECK_FALSE(moe::cost::unpriced(plan).empty());
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h100"));
    CHECK(moe::cost::unpriced(plan).empty());
}

TEST_CASE("a group of several instances lies like the one that touches most domains") {
    moe::plan::Plan plan;
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("gb200-nvl72"));
    plan.gpus = 960; // domains of 64
    plan.tp = 4, plan.cp = 2, plan.dp = 24, plan.pp = 5;
    plan.ep = 16, plan.edp = 12;
    const moe::plan::Mesh mesh(plan);
    const moe::cost::Routes routes(*plan.hardware);
    for (const moe::plan::Domain domain : {moe::plan::Domain::dense, moe::plan::Domain::expert})
        for (const std::uint8_t axes : {1, 2, 4, 5, 8, 10, 15}) {
            const moe::plan::Group group{domain, axes};
            CAPTURE(moe::plan::to_string(group));
            moe::cost::Placement worst = moe::cost::place(mesh.members(group, 0), 64, 64);
            for (int rank = 0; rank < plan.gpus; ++rank) {
                const moe::cost::Placement p = moe::cost::place(mesh.members(group, rank), 64, 64);
                if (std::pair(-p.domains, p.per_domain) < std::pair(-worst.domains, worst.per_domain)) worst = p;
            }
            CHECK(routes.placement(plan, group) == worst);
        }
}

TEST_CASE("routes: the fullest of a member's own links sets the rate") {
    const moe::machine::Hardware h = moe::machine::load_hardware("h100"); // NVLink 450 GB/s, NIC 50 GB/s
    CHECK(moe::cost::exchange_route(h, {8, 1, 8}).bandwidth == nearly(450e9));
    // 16 ranks on two nodes: 8 of 15 messages leave the node.
    CHECK(moe::cost::exchange_route(h, {16, 2, 8}).bandwidth == nearly(50e9 * 15 / 8));
    CHECK(moe::cost::exchange_route(h, {8, 8, 1}).bandwidth == nearly(50e9));
    CHECK(moe::cost::ring_route(h, {8, 1, 8}).bandwidth == nearly(450e9));
    // Eight rings over eight NICs: 8 x 50 GB/s is below what NVLink passes on.
    CHECK(moe::cost::ring_route(h, {16, 2, 8}).bandwidth == nearly(400e9));
    CHECK(moe::cost::ring_route(h, {4, 4, 1}).bandwidth == nearly(50e9));
    CHECK(moe::cost::exchange_route(h, {8, 1, 8}).latency == nearly(h.nvlink.latency));
    CHECK(moe::cost::exchange_route(h, {16, 2, 8}).latency == nearly(h.nic.latency));
    moe::machine::Hardware lonely = h;
    lonely.nic.bandwidth = 0.0;
    CHECK_THROWS_AS(moe::cost::exchange_route(lonely, {16, 2, 8}), moe::Error);
}

TEST_CASE("routes: a NIC that answers sooner takes no message from NVLink") {
    moe::machine::Hardware h = moe::machine::load_hardware("h100");
    const moe::cost::Route far = moe::cost::ring_route(h, {16, 2, 8});
    for (const double latency : {0.0, h.nvlink.latency / 2, h.nvlink.latency}) {
        h.nic.latency = latency;
        CHECK(moe::cost::exchange_route(h, {8, 1, 8}).bandwidth == nearly(h.nvlink.bandwidth));
        CHECK(moe::cost::pair_route(h, {2, 1, 2}).latency == nearly(h.nvlink.latency));
        CHECK(moe::cost::ring_route(h, {16, 2, 8}).bandwidth == nearly(far.bandwidth));
        CHECK(moe::cost::domain_route(h, {16, 2, 8}).latency == nearly(latency));
    }
}

TEST_CASE("collectives: (n-1)/n of the bytes at the ring's rate, small ones by latency") {
    const moe::machine::Hardware h = moe::machine::load_hardware("h100");
    const moe::cost::GroupLinks node = links(h, {8, 1, 8});
    const double big = 8e9;
    CHECK(moe::cost::all_gather_seconds(node, big) == nearly(big * 7 / 8 / 450e9).epsilon(0.01));
    CHECK(moe::cost::reduce_scatter_seconds(node, big) == nearly(moe::cost::all_gather_seconds(node, big)));
    CHECK(moe::cost::all_reduce_seconds(node, big) == nearly(2 * moe::cost::all_gather_seconds(node, big)));
    CHECK(moe::cost::all_gather_seconds(node, 8.0) < 7.5 * h.nvlink.latency);
    CHECK(moe::cost::all_gather_seconds(node, 8.0) >= 3 * h.nvlink.latency);
    CHECK(moe::cost::all_reduce_seconds(links(h, {16, 2, 8}), big) > moe::cost::all_reduce_seconds(node, big));
    CHECK(moe::cost::all_gather_seconds(links(h, {1, 1, 1}), big) == 0.0);
    CHECK(moe::cost::pair_seconds(links(h, {2, 2, 1}), 50e6) == nearly(1e-3 + h.nic.latency));
}

// Copies per token, K 8 of 256 experts: 5.29/6.52/7.27/7.68 ranks of 8/16/32/64 and 1.99/3.61/5.29 nodes of 2/4/8 under
// uniform routing, 1.97/3.14/4.00 nodes when 4 of 8 groups are kept (derived from DeepSeek-V3's routing).
TEST_CASE("distinct destinations of a token") {
    moe::model::Router uniform;
    CHECK(moe::plan::distinct_destinations(256, 8, 1, uniform) == 1.0);
    CHECK(moe::plan::distinct_destinations(256, 8, 8, uniform) == nearly(5.29).epsilon(0.002));
    CHECK(moe::plan::distinct_destinations(256, 8, 16, uniform) == nearly(6.52).epsilon(0.002));
    CHECK(moe::plan::distinct_destinations(256, 8, 64, uniform) == nearly(7.68).epsilon(0.002));
    const moe::model::Router limited = deepseek().router;
    CHECK(limited.groups == 8);
    CHECK(moe::plan::distinct_destinations(256, 8, 2, limited) == nearly(1.97).epsilon(0.005));
    CHECK(moe::plan::distinct_destinations(256, 8, 4, limited) == nearly(3.14).epsilon(0.005));
    CHECK(moe::plan::distinct_destinations(256, 8, 8, limited) == nearly(4.0).epsilon(0.005));
    // Every expert chosen: every part is met.
    CHECK(moe::plan::distinct_destinations(8, 8, 4, uniform) == nearly(4.0));
}

// arXiv 2603.07685 Table 7: microseconds of dispatch at h 7168, 4096 tokens, 256 experts, top 8, BF16.
TEST_CASE("dispatch latencies of the published table within a quarter") {
    struct Row {
        const char* hardware;
        moe::cost::Placement placement;
        double hybrid, alltoall, hybrid_efficiency, alltoall_efficiency;
    };
    const Row rows[] = {
        {"gb200-nvl72", {8, 1, 8}, 391e-6, 735e-6, 0.7, 0.6},   {"gb200-nvl72", {16, 1, 16}, 578e-6, 743e-6, 0.7, 0.6},
        {"gb200-nvl72", {32, 1, 32}, 612e-6, 769e-6, 0.7, 0.6}, {"gb200-nvl72", {64, 1, 64}, 675e-6, 930e-6, 0.7, 0.6},
        {"h100", {8, 1, 8}, 661e-6, 1265e-6, 0.88, 0.85},       {"h100", {16, 2, 8}, 1485e-6, 5774e-6, 0.88, 0.85},
        {"h100", {32, 4, 8}, 3064e-6, 8059e-6, 0.88, 0.85},     {"h100", {64, 8, 8}, 4626e-6, 9164e-6, 0.88, 0.85}};
    const double copy = 4096.0 * 7168.0 * 2.0;
    for (const Row& row : rows) {
        CAPTURE(row.hardware);
        CAPTURE(row.placement.size);
        const moe::machine::Hardware hardware = moe::machine::load_hardware(row.hardware);
        const double hybrid = moe::cost::token_exchange_seconds(
            links(hardware, row.placement, 1.0), {row.hybrid_efficiency, row.hybrid_efficiency}, copy, deepseek());
        const double alltoall =
            moe::cost::all_to_all_seconds(links(hardware, row.placement, row.alltoall_efficiency), 8 * copy);
        CHECK(std::abs(hybrid / row.hybrid - 1.0) < 0.25);
        CHECK(std::abs(alltoall / row.alltoall - 1.0) < 0.25);
    }
}
