// Communication groups of both factorings, against worked examples of the published rank order.
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"

#include <doctest/doctest.h>

#include <set>

namespace {

using namespace moe;
using Ranks = std::vector<int>;

struct Degrees {
    int gpus, tp, cp, dp, pp, etp, ep, edp;
};

plan::Plan plan_of(Degrees d, const std::string& order = "tp-cp-ep-dp-pp") {
    plan::Plan plan;
    plan.gpus = d.gpus;
    plan.tp = d.tp;
    plan.cp = d.cp;
    plan.dp = d.dp;
    plan.pp = d.pp;
    plan.etp = d.etp;
    plan.ep = d.ep;
    plan.edp = d.edp;
    plan.rank_order = order;
    return plan;
}

plan::Group dense(int axes) { return {plan::Domain::dense, static_cast<std::uint8_t>(axes)}; }
plan::Group expert(int axes) { return {plan::Domain::expert, static_cast<std::uint8_t>(axes)}; }

Ranks range(int first, int last) {
    Ranks ranks;
    for (int i = first; i <= last; ++i) ranks.push_back(i);
    return ranks;
}

std::string refusal(const plan::Plan& plan) {
    try {
        const plan::Mesh mesh(plan);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

// Every group kind must split the ranks into disjoint groups of one size that agree about their members and order.
void check_partition(const plan::Mesh& mesh, plan::Group group) {
    std::set<Ranks> groups;
    for (int rank = 0; rank < mesh.size(); ++rank) {
        const Ranks members = mesh.members(group, rank);
        REQUIRE(static_cast<int>(members.size()) == mesh.group_size(group));
        REQUIRE(members[static_cast<std::size_t>(mesh.index(group, rank))] == rank);
        groups.insert(members);
    }
    std::set<int> covered;
    for (const Ranks& members : groups) covered.insert(members.begin(), members.end());
    CHECK(static_cast<int>(covered.size()) == mesh.size());
    CHECK(static_cast<int>(groups.size()) * mesh.group_size(group) == mesh.size());
}

} // namespace

TEST_CASE("mesh: 16 GPUs, TP2 CP2 DP2 PP2 with EP8 folded over TP, CP and DP") {
    const plan::Mesh mesh(plan_of({16, 2, 2, 2, 2, 1, 8, 1}));
    CHECK(mesh.members(dense(plan::axis::tensor), 0) == Ranks{0, 1});
    CHECK(mesh.members(dense(plan::axis::tensor), 3) == Ranks{2, 3});
    CHECK(mesh.members(dense(plan::axis::context), 0) == Ranks{0, 2});
    CHECK(mesh.members(dense(plan::axis::context), 1) == Ranks{1, 3});
    CHECK(mesh.members(dense(plan::axis::context), 6) == Ranks{4, 6});
    CHECK(mesh.members(dense(plan::axis::context), 5) == Ranks{5, 7});
    CHECK(mesh.members(dense(plan::axis::data), 0) == Ranks{0, 4});
    CHECK(mesh.members(dense(plan::axis::data), 5) == Ranks{1, 5});
    CHECK(mesh.members(dense(plan::axis::data), 2) == Ranks{2, 6});
    CHECK(mesh.members(dense(plan::axis::data | plan::axis::context), 4) == Ranks{0, 2, 4, 6});
    CHECK(mesh.members(dense(plan::axis::data | plan::axis::context), 1) == Ranks{1, 3, 5, 7});
    CHECK(mesh.members(dense(plan::axis::pipeline), 0) == Ranks{0, 8});
    CHECK(mesh.members(expert(plan::axis::pipeline), 9) == Ranks{1, 9});
    CHECK(mesh.members(expert(plan::axis::expert), 3) == range(0, 7));
    CHECK(mesh.members(expert(plan::axis::expert), 8) == range(8, 15));
    CHECK(mesh.members(expert(plan::axis::data), 11) == Ranks{11});
}

TEST_CASE("mesh: the same ranks with EP4 leave EDP2") {
    const plan::Mesh mesh(plan_of({16, 2, 2, 2, 2, 1, 4, 2}));
    CHECK(mesh.members(expert(plan::axis::expert), 0) == range(0, 3));
    CHECK(mesh.members(expert(plan::axis::expert), 14) == range(12, 15));
    CHECK(mesh.members(expert(plan::axis::data), 0) == Ranks{0, 4});
    CHECK(mesh.members(expert(plan::axis::data), 5) == Ranks{1, 5});
    CHECK(mesh.members(expert(plan::axis::data), 8) == Ranks{8, 12});
}

TEST_CASE("mesh: 4 GPUs, TP = ETP = 2 and EP2") {
    const plan::Mesh mesh(plan_of({4, 2, 1, 2, 1, 2, 2, 1}));
    CHECK(mesh.members(expert(plan::axis::tensor), 0) == Ranks{0, 1});
    CHECK(mesh.members(expert(plan::axis::tensor), 2) == Ranks{2, 3});
    CHECK(mesh.members(expert(plan::axis::expert), 0) == Ranks{0, 2});
    CHECK(mesh.members(expert(plan::axis::expert), 3) == Ranks{1, 3});
}

TEST_CASE("mesh: 256 GPUs, TP4 CP2 DP8 PP4: a pipeline slice of 64 ranks is one EP group") {
    const plan::Mesh mesh(plan_of({256, 4, 2, 8, 4, 1, 64, 1}));
    for (int slice = 0; slice < 4; ++slice)
        CHECK(mesh.members(expert(plan::axis::expert), 64 * slice + 17) == range(64 * slice, 64 * slice + 63));
    CHECK(mesh.group_size(expert(plan::axis::data)) == 1);
}

TEST_CASE("mesh: CP8 and EP8 share 8 GPUs") {
    const plan::Mesh mesh(plan_of({8, 1, 8, 1, 1, 1, 8, 1}));
    CHECK(mesh.members(dense(plan::axis::context), 5) == range(0, 7));
    CHECK(mesh.members(expert(plan::axis::expert), 5) == range(0, 7));
}

TEST_CASE("mesh: the published DeepSeek-V3 mappings") {
    const plan::Mesh gb200(plan_of({256, 1, 1, 64, 4, 1, 64, 1}));
    CHECK(gb200.group_size(dense(plan::axis::data)) == 64);
    CHECK(gb200.group_size(expert(plan::axis::data)) == 1);
    const plan::Mesh h100(plan_of({1024, 2, 1, 64, 8, 1, 64, 2}));
    CHECK(h100.group_size(dense(plan::axis::data)) == 64);
    CHECK(h100.group_size(expert(plan::axis::data)) == 2);
    CHECK(h100.members(expert(plan::axis::data), 0) == Ranks{0, 64});
}

TEST_CASE("mesh: groups partition the ranks in every order that is accepted") {
    const Degrees degrees{32, 2, 2, 4, 2, 2, 2, 4};
    for (const char* order :
         {"tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-tp-ep-dp-pp", "pp-dp-ep-cp-tp", "dp-ep-tp-cp-pp"}) {
        CAPTURE(order);
        const plan::Mesh mesh(plan_of(degrees, order));
        for (int axes = 0; axes < 32; ++axes) {
            check_partition(mesh, dense(axes));
            check_partition(mesh, expert(axes));
            std::set<int> first;
            for (int rank = 0; rank < mesh.size(); ++rank) first.insert(mesh.members(dense(axes), rank).front() % 12);
            CHECK(mesh.first_members(dense(axes), 12) == Ranks(first.begin(), first.end()));
            for (int other = 0; other < 32; ++other)
                CHECK(mesh.same_members(dense(axes), expert(other)) ==
                      (mesh.members(dense(axes), 0) == mesh.members(expert(other), 0)));
        }
    }
}

TEST_CASE("mesh: DP outermost is accepted while both factorings have equal pipeline groups") {
    // 2 x 4 ranks inside a pipeline slice on either side, so neighbours are 4 apart in both.
    const plan::Mesh mesh(plan_of({16, 2, 2, 2, 2, 1, 4, 2}, "tp-cp-ep-pp-dp"));
    CHECK(mesh.members(dense(plan::axis::pipeline), 1) == Ranks{1, 5});
    CHECK(mesh.members(expert(plan::axis::pipeline), 1) == Ranks{1, 5});
    CHECK(mesh.members(dense(plan::axis::data), 1) == Ranks{1, 9});
    // EP8 folds over DP: 8 apart in the expert mesh against 4.
    const std::string why = refusal(plan_of({16, 2, 2, 2, 2, 1, 8, 1}, "tp-cp-ep-pp-dp"));
    CHECK(why.find("4 ranks apart in the dense mesh and 8 in the expert mesh") != std::string::npos);
}

TEST_CASE("mesh: coordinates and group names") {
    const plan::Mesh mesh(plan_of({16, 2, 2, 2, 2, 1, 8, 1}));
    CHECK(mesh.coordinate(plan::Domain::dense, plan::axis::tensor, 13) == 1);
    CHECK(mesh.coordinate(plan::Domain::dense, plan::axis::context, 13) == 0);
    CHECK(mesh.coordinate(plan::Domain::dense, plan::axis::data, 13) == 1);
    CHECK(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, 13) == 1);
    CHECK(mesh.coordinate(plan::Domain::expert, plan::axis::expert, 13) == 5);
    CHECK(plan::to_string(dense(plan::axis::tensor)) == "tp");
    CHECK(plan::to_string(dense(plan::axis::data | plan::axis::context)) == "dp+cp");
    CHECK(plan::to_string(expert(plan::axis::tensor | plan::axis::expert)) == "etp+ep");
    CHECK(plan::to_string(expert(plan::axis::data)) == "edp");
    CHECK(plan::to_string(expert(plan::axis::pipeline)) == "pp");
    CHECK(plan::to_string(dense(0)) == "none");
}

TEST_CASE("mesh: bad orders and degrees are refused by name") {
    const Degrees degrees{16, 2, 2, 2, 2, 1, 8, 1};
    CHECK(refusal(plan_of(degrees, "")).find("unknown axis \"\"") != std::string::npos);
    CHECK(refusal(plan_of(degrees, "tp-cp-ep-dp-pq")).find("unknown axis \"pq\"") != std::string::npos);
    CHECK(refusal(plan_of(degrees, "tp-cp-ep-dp-pp-tp")).find("\"tp\" appears twice") != std::string::npos);
    CHECK(refusal(plan_of(degrees, "tp-ep-dp-pp")).find("\"cp\" is missing though its degree is 2") !=
          std::string::npos);
    CHECK(refusal(plan_of({16, 2, 2, 2, 2, 1, 8, 2})).find("etp*ep*edp*pp = more than 16") != std::string::npos);
    CHECK(refusal(plan_of({16, 2, 1, 2, 2, 1, 8, 1})).find("tp*cp*dp*pp = 8 ranks for 16 GPUs") != std::string::npos);
    CHECK(refusal(plan_of({16, -2, -2, 2, 2, 1, 8, 1})).find("tp is -2") != std::string::npos);
    CHECK(refusal(plan_of({16, 2000000000, 2000000000, 2000000000, 2000000000, 1, 8, 1})) != "");
    // An axis of degree 1 may be left out.
    CHECK(refusal(plan_of({8, 2, 1, 4, 1, 1, 8, 1}, "tp-ep-dp")) == "");
}
