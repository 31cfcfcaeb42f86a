// Collectives against sums done by hand, between threads on one permit and on many and between processes, and the end
// of all ranks when one fails.
#include "engine/comm/threads.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/op_attr.hpp"
#include "tests/engine/comm/gang.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <numeric>

using namespace moe;

namespace {

constexpr plan::Group tp{plan::Domain::dense, plan::axis::tensor};
constexpr plan::Group samples{plan::Domain::dense, plan::axis::data};
constexpr plan::Group ep{plan::Domain::expert, plan::axis::expert};
constexpr plan::Group etp{plan::Domain::expert, plan::axis::tensor};

plan::Plan mesh_plan(int tensor, int data, int pipeline, int expert, int expert_tensor) {
    plan::Plan plan;
    plan.gpus = tensor * data * pipeline;
    plan.tp = tensor;
    plan.dp = data;
    plan.pp = pipeline;
    plan.ep = expert;
    plan.etp = expert_tensor;
    plan.edp = plan.gpus / (pipeline * expert * expert_tensor);
    return plan;
}

// Runs body(communicator) on every rank of the mesh.
template <class Body>
void on_ranks(const plan::Plan& plan, int permits, Body body) {
    const plan::Mesh mesh(plan);
    engine::Cores cores(mesh.size(), permits);
    comm::ThreadFabric fabric(mesh, cores);
    cores.run([&](int rank) {
        comm::ThreadCommunicator communicator(fabric, rank);
        body(communicator);
    });
    // Sockets give the same; each rank is behind a transport of its own, as a process has it.
    on_transports(mesh.size(), [&](comm::Transport& transport) {
        comm::ProcessCommunicator communicator(transport, mesh);
        body(communicator);
    });
}

// Counted instead of checked on the ranks: doctest's checks are slow under many threads.
struct Wrong {
    std::atomic<int> count{0};
    void unless(bool right) { count += right ? 0 : 1; }
};

} // namespace

TEST_CASE("dense collectives agree with sums done by hand, in place and not, with fewer permits than ranks") {
    for (const int permits : {1, 2, 8}) {
        Wrong wrong;
        on_ranks(mesh_plan(4, 2, 1, 1, 1), permits, [&](comm::Communicator& c) {
            const int size = c.size(tp), me = c.index(tp), base = c.rank() - me;
            for (int repeat = 0; repeat < 20; ++repeat) {
                std::vector<float> x(12), y(48), sum(3);
                for (int i = 0; i < 12; ++i)
                    x[static_cast<std::size_t>(i)] = static_cast<float>(100 * c.rank() + i + repeat);
                c.all_gather(tp, x.data(), y.data(), 12 * 4);
                for (int m = 0; m < size; ++m)
                    for (int i = 0; i < 12; ++i)
                        wrong.unless(y[static_cast<std::size_t>(m) * 12 + static_cast<std::size_t>(i)] ==
                                     static_cast<float>(100 * (base + m) + i + repeat));
                c.reduce_scatter(tp, x.data(), sum.data(), 3, program::Dtype::f32);
                const int ranks = 4 * base + 6;
                for (int i = 0; i < 3; ++i)
                    wrong.unless(sum[static_cast<std::size_t>(i)] ==
                                 static_cast<float>(100 * ranks + 4 * (3 * me + i + repeat)));
                std::vector<float> in_place = x;
                c.reduce_scatter(tp, in_place.data(), in_place.data() + 3 * me, 3, program::Dtype::f32);
                wrong.unless(std::equal(sum.begin(), sum.end(), in_place.begin() + 3 * me));
                c.all_gather(tp, in_place.data() + 3 * me, in_place.data(), 12);
                for (int i = 0; i < 12; ++i)
                    wrong.unless(in_place[static_cast<std::size_t>(i)] ==
                                 static_cast<float>(100 * ranks + 4 * (i + repeat)));
                c.all_reduce(tp, x.data(), x.data(), 12, program::Dtype::f32, false);
                wrong.unless(x == in_place);
                float largest = static_cast<float>(c.rank());
                c.all_reduce(samples, &largest, &largest, 1, program::Dtype::f32, true);
                wrong.unless(largest == static_cast<float>(c.rank() % 4 + 4));
                std::vector<int> from(5), mine(5, c.rank());
                c.ring_exchange(tp, mine.data(), from.data(), 5 * 4);
                wrong.unless(from[4] == base + (me + 3) % 4);
            }
        });
        CHECK(wrong.count == 0);
    }
}

TEST_CASE("all_to_all turns sequence shards into head shards and back") {
    Wrong wrong;
    on_ranks(mesh_plan(4, 1, 1, 1, 1), 2, [&](comm::Communicator& c) {
        // Each rank has, of 16 rows, two runs of two: value = row of the whole * 100 + column. Pieces of 8 and 4
        // columns.
        std::vector<std::int32_t> x, heads(48), back(48);
        for (const int row : {2 * c.rank(), 2 * c.rank() + 1, 14 - 2 * c.rank(), 15 - 2 * c.rank()})
            for (int col = 0; col < 12; ++col) x.push_back(row * 100 + col);
        c.all_to_all(tp, x.data(), heads.data(), {true, 4, 4, 12, {8, 4}}, 4);
        for (int row = 0; row < 16; ++row)
            for (int col = 0; col < 3; ++col)
                wrong.unless(heads[static_cast<std::size_t>(row) * 3 + static_cast<std::size_t>(col)] ==
                             row * 100 + (col < 2 ? 2 * c.rank() + col : 8 + c.rank()));
        c.all_to_all(tp, heads.data(), back.data(), {false, 4, 16, 3, {8, 4}}, 4);
        wrong.unless(back == x);
    });
    CHECK(wrong.count == 0);
}

TEST_CASE("slots reach the members that they are for and come back, no more of them than the rows that there are") {
    Wrong wrong;
    on_ranks(mesh_plan(1, 4, 1, 4, 1), 2, [&](comm::Communicator& c) {
        // Member s has (s + m) % 3 rows of two columns for member m, in slots of three.
        const int me = c.index(ep);
        std::vector<std::int32_t> counts;
        for (int s = 0; s < 4; ++s)
            for (int m = 0; m < 4; ++m) counts.push_back((s + m) % 3);
        std::vector<float> x, y(24, -1.0f), home(24, -1.0f);
        for (int i = 0; i < 24; ++i) x.push_back(static_cast<float>(100 * me + i));
        const program::RowsAttr to{2, 3, 8, 4, 1, false}, back{2, 3, 8, 4, 1, true};
        c.all_to_all_slots(ep, x.data(), counts.data(), y.data(), to, program::Dtype::f32);
        for (int s = 0; s < 4; ++s)
            for (int i = 0; i < 6; ++i)
                wrong.unless(y[static_cast<std::size_t>(6 * s + i)] ==
                             (i < 2 * ((s + me) % 3) ? static_cast<float>(100 * s + 6 * me + i) : -1.0f));
        c.all_to_all_slots(ep, y.data(), counts.data(), home.data(), back, program::Dtype::f32);
        for (int m = 0; m < 4; ++m)
            for (int i = 0; i < 6; ++i)
                wrong.unless(home[static_cast<std::size_t>(6 * m + i)] ==
                             (i < 2 * ((me + m) % 3) ? x[static_cast<std::size_t>(6 * m + i)] : -1.0f));
    });
    CHECK(wrong.count == 0);
}

TEST_CASE("a slot with more rows than it was planned for ends the ranks with the numbers") {
    const plan::Plan plan = mesh_plan(1, 2, 1, 2, 1);
    CHECK_THROWS_WITH_AS(
        on_ranks(
            plan, 2,
            [](comm::Communicator& c) {
                const std::vector<std::int32_t> counts{0, 4, 0, 0};
                std::vector<float> x(6), y(6);
                c.all_to_all_slots(ep, x.data(), counts.data(), y.data(), {1, 3, 4, 2, 1, false}, program::Dtype::f32);
            }),
        doctest::Contains("4 rows from member 0 to 1, a slot has 3"), Error);
}

TEST_CASE("routed rows reach their experts over EP and ETP and come back summed") {
    Wrong wrong;
    const int experts = 6;
    on_ranks(mesh_plan(2, 3, 1, 3, 2), 3, [&](comm::Communicator& c) {
        const plan::Group both{plan::Domain::expert, plan::axis::expert | plan::axis::tensor};
        const int me = c.index(ep), member = c.index(etp);
        // Source s sends (s + expert) % 3 rows to each expert; a row carries source and expert.
        std::vector<std::int32_t> counts(experts), all(36);
        std::vector<float> rows;
        const int source = me * 2 + member;
        for (int e = 0; e < experts; ++e) {
            counts[static_cast<std::size_t>(e)] = (source + e) % 3;
            for (int i = 0; i < counts[static_cast<std::size_t>(e)]; ++i)
                rows.insert(rows.end(), {static_cast<float>(source), static_cast<float>(e)});
        }
        c.all_gather(both, counts.data(), all.data(), experts * 4);
        for (int s = 0; s < 6; ++s)
            for (int e = 0; e < experts; ++e)
                wrong.unless(all[static_cast<std::size_t>(s) * experts + static_cast<std::size_t>(e)] == (s + e) % 3);
        const program::RowsAttr to{2, 100, experts, 3, 2, false}, back{2, 100, experts, 3, 2, true};
        std::vector<float> arrived(200, -1), gathered(400, -1), local(200, -1), home(rows.size(), -1);
        c.all_to_all_rows(ep, rows.data(), all.data(), arrived.data(), to, program::Dtype::f32, 10, 100);
        c.all_gather_rows(etp, arrived.data(), all.data(), gathered.data(), to, program::Dtype::f32, 100, 200);
        std::size_t at = 0;
        for (int m = 0; m < 2; ++m)
            for (int s = 0; s < 3; ++s)
                for (int e = 2 * me; e < 2 * me + 2; ++e)
                    for (int i = 0; i < (s * 2 + m + e) % 3; ++i) {
                        wrong.unless(gathered[at++] == static_cast<float>(s * 2 + m));
                        wrong.unless(gathered[at++] == static_cast<float>(e));
                    }
        wrong.unless(gathered[at] == -1);
        c.reduce_scatter_rows(etp, gathered.data(), all.data(), local.data(), back, program::Dtype::f32, 200, 100);
        c.all_to_all_rows(ep, local.data(), all.data(), home.data(), back, program::Dtype::f32, 100,
                          static_cast<std::int64_t>(rows.size() / 2));
        for (std::size_t i = 0; i < rows.size(); ++i) wrong.unless(home[i] == 2 * rows[i]);
    });
    CHECK(wrong.count == 0);
}

TEST_CASE("rows beyond the planned capacity are refused, not written") {
    CHECK_THROWS_WITH_AS(on_ranks(mesh_plan(1, 2, 1, 2, 1), 2,
                                  [&](comm::Communicator& c) {
                                      const std::vector<std::int32_t> all{3, 0, 4, 0};
                                      std::vector<float> x(4), y(5);
                                      c.all_to_all_rows(ep, x.data(), all.data(), y.data(), {1, 5, 2, 2, 1, false},
                                                        program::Dtype::f32, 4, 5);
                                  }),
                         "all_to_all_rows: 7 routed rows do not fit a buffer of 5; plan with capacity 0 (worst case)",
                         Error);
}

TEST_CASE("messages keep their order per tag and stage and never block the sender") {
    Wrong wrong;
    on_ranks(mesh_plan(1, 2, 3, 1, 1), 1, [&](comm::Communicator& c) {
        const int stage = c.index({plan::Domain::dense, plan::axis::pipeline});
        for (int round = 0; round < 30; ++round) {
            const int value = 1000 * stage + round, again = value + 500;
            c.send({1, 0, 7}, &value, 4);
            c.send({1, 1, 7}, &again, 4);
        }
        for (int round = 0; round < 30; ++round) {
            int second = 0, first = 0;
            c.recv({-1, 1, 7}, &second, 4);
            c.recv({-1, 0, 7}, &first, 4);
            wrong.unless(first == 1000 * ((stage + 2) % 3) + round && second == first + 500);
        }
    });
    CHECK(wrong.count == 0);
}

TEST_CASE("a rank that fails ends all others with its own line") {
    std::atomic<int> ended{0};
    const plan::Plan plan = mesh_plan(4, 2, 1, 1, 1);
    const plan::Mesh mesh(plan);
    engine::Cores cores(8, 2);
    comm::ThreadFabric fabric(mesh, cores);
    const auto job = [&](int rank) {
        struct Count {
            std::atomic<int>& ended;
            ~Count() { ++ended; }
        } count{ended};
        comm::ThreadCommunicator c(fabric, rank);
        float x = 1;
        c.all_reduce(samples, &x, &x, 1, program::Dtype::f32, false);
        if (rank == 5) fail("rank 5 lost its disk");
        for (int i = 0; i < 100; ++i) c.all_reduce(tp, &x, &x, 1, program::Dtype::f32, false);
    };
    CHECK_THROWS_WITH_AS(cores.run(job), "rank 5 lost its disk", Error);
    CHECK(ended >= 5);
    // The gang stays broken: a later step says the same instead of hanging.
    CHECK_THROWS_WITH_AS(cores.run(job), "rank 5 lost its disk", Error);
}

// Freed memory that another rank reads or writes is what AddressSanitizer reports.
TEST_CASE("what a rank hands to the others is theirs until none uses it, when a rank fails as well") {
    const plan::Plan plan = mesh_plan(4, 2, 1, 1, 1);
    const plan::Mesh mesh(plan);
    for (int round = 0; round < 60; ++round) {
        engine::Cores cores(8, 1 + round % 8);
        comm::ThreadFabric fabric(mesh, cores);
        CHECK_THROWS_WITH_AS(cores.run([&](int rank) {
            comm::ThreadCommunicator c(fabric, rank);
            for (int i = 0; i < 8; ++i) {
                std::vector<float> x(20000, 1.0f), y(20000);
                if (rank == 5 && i == round % 8) fail("rank 5 lost its disk");
                c.all_reduce(i % 2 == 0 ? tp : samples, x.data(), y.data(), 20000, program::Dtype::f32, false);
            }
        }),
                             "rank 5 lost its disk", Error);
    }
}

TEST_CASE("a wait that nobody can end is reported at once") {
    CHECK_THROWS_WITH_AS(on_ranks(mesh_plan(2, 1, 1, 1, 1), 2,
                                  [&](comm::Communicator& c) {
                                      float x = 0;
                                      if (c.rank() == 1) c.all_reduce(tp, &x, &x, 1, program::Dtype::f32, false);
                                  }),
                         "deadlock: rank 1 waits for all_reduce", Error);
}

TEST_CASE("sums in BF16 are rounded once and do not depend on timing") {
    std::vector<std::uint16_t> first;
    for (int repeat = 0; repeat < 5; ++repeat) {
        std::vector<std::uint16_t> result(8);
        on_ranks(mesh_plan(8, 1, 1, 1, 1), 1 + repeat % 3, [&](comm::Communicator& c) {
            // 1 + rank / 128 in BF16: 0x3f80 + rank.
            std::vector<std::uint16_t> x(8, static_cast<std::uint16_t>(0x3f80 + c.rank()));
            c.all_reduce(tp, x.data(), x.data(), 8, program::Dtype::bf16, false);
            if (c.rank() == 3) result = x;
        });
        // 8 + 28 / 128 = 8.21875, between the BF16 neighbours 8.1875 and 8.25, exactly half way: the even one is 8.25
        // (0x4104).
        CHECK(result == std::vector<std::uint16_t>(8, 0x4104));
    }
}
