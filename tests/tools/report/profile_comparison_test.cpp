// Kernels beside ops: sums per step, kinds that a kernel's name does not tell apart, bare communication, unmatched
// names.
#include "tests/support/nearly.hpp"
#include "tools/report/profile_comparison.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;
using program::OpKind;

namespace {

program::TimelineRow row(OpKind kind, double start, double end, double busy) {
    program::TimelineRow r;
    r.kind = kind;
    r.start = start;
    r.end = end;
    r.busy = busy;
    return r;
}
program::Timeline predicted() {
    program::Timeline t;
    t.ranks = {0, 8};
    t.step_seconds = 10.0;
    t.rows = {row(OpKind::gemm, 0.0, 2.0, 2.0),       row(OpKind::grouped_gemm, 2.0, 3.0, 1.0),
              row(OpKind::add, 3.0, 3.5, 0.5),        row(OpKind::rope, 3.5, 4.0, 0.5),
              row(OpKind::all_gather, 3.0, 6.0, 1.0), row(OpKind::adamw, 6.0, 7.0, 1.0)};
    t.rows.push_back(row(OpKind::gemm, 0.0, 9.0, 9.0)); // of another rank
    t.rows.back().rank = 8;
    return t;
}
KernelTable table() {
    KernelTable t;
    t.rules = {{"products", {"mm"}, {}, {OpKind::gemm, OpKind::grouped_gemm}, false},
               {"rotation", {"rope"}, {}, {OpKind::rope, OpKind::mla_rope}, false},
               {"gather", {"nccl"}, {}, {OpKind::all_gather}, false},
               {"router", {"topk"}, {}, {OpKind::router, OpKind::router_load}, false},
               {"copies", {"Memcpy"}, {}, {OpKind::copy_to_host}, false},
               {"element by element", {"elementwise"}, {}, {OpKind::add, OpKind::rope, OpKind::router}, true}};
    return t;
}

struct Profile {
    DeviceProfile profile;
    ProfiledSteps steps;
    Profile() {
        profile.devices = {"0"};
        steps.steps = {{1, 8.0}, {2, 8.0}};
        steps.seconds = 8.0;
    }
    // In both steps, which begin at 0 and 8.
    void add(const std::string& name, double start, double end, int stream = 7, int device = 0) {
        profile.names.push_back({name, ""});
        for (const double step : {0.0, 8.0}) {
            DeviceEvent event;
            event.name = static_cast<std::int32_t>(profile.names.size()) - 1;
            event.start = step + start;
            event.end = step + end;
            event.stream = stream;
            event.device = device;
            steps.events.push_back(event);
        }
    }
    ProfileComparison compared() const { return compare_profile(predicted(), 0, profile, steps, table()); }
};

const ProfileRow& named(const ProfileComparison& c, const char* name) {
    for (const ProfileRow& one : c.rows)
        if (one.name == name) return one;
    FAIL("no row " << name);
    return c.rows.front();
}

} // namespace

TEST_CASE("profile beside prediction: rows, per step and rank") {
    Profile p;
    p.add("mm_1", 0.0, 2.5);
    p.add("mm_2", 2.5, 3.0);
    p.add("rope_kernel", 3.0, 3.5);
    p.add("elementwise", 3.5, 4.5);
    p.add("nccl", 4.0, 6.0, 20);
    p.add("topk", 6.0, 6.5);
    p.add("odd", 6.5, 7.0);
    const ProfileComparison c = p.compared();

    const ProfileRow& products = named(c, "products"); // two kinds that mm does not tell apart
    CHECK(products.kinds == std::vector<OpKind>{OpKind::gemm, OpKind::grouped_gemm});
    CHECK(products.count == 2);
    CHECK(products.kernels == 2.0);
    CHECK(products.predicted == nearly(3.0));
    CHECK(products.measured == nearly(3.0));

    CHECK(named(c, "rope").measured == nearly(0.5)); // one kind of the rule's two is in the plan
    const ProfileRow& rest = named(c, "add");        // rope is taken, and the plan has no router
    CHECK(rest.predicted == nearly(0.5));
    CHECK(rest.measured == nearly(1.0));

    const ProfileRow& gather = named(c, "all_gather");
    CHECK(gather.communication);
    CHECK(gather.predicted == nearly(1.0));
    CHECK(gather.predicted_wait == nearly(2.0));
    CHECK(gather.measured == nearly(2.0));

    CHECK(named(c, "adamw").measured == 0.0);
    CHECK(named(c, "adamw").predicted == nearly(1.0));
    const ProfileRow& router = named(c, "router"); // the label: the plan has none of its kinds
    CHECK(router.count == 0);
    CHECK(router.predicted == 0.0);
    CHECK(router.measured == nearly(0.5));
    CHECK(c.rows.front().name == "products");

    REQUIRE(c.unmatched.size() == 1);
    CHECK(c.unmatched[0].name == "odd");
    CHECK(c.unmatched[0].kernels == 1.0);
    CHECK(c.unmatched[0].seconds == nearly(0.5));
    CHECK(c.unmatched[0].share == nearly(0.5 / 7.5));
    CHECK(c.unmatched_seconds == nearly(0.5));
    CHECK(c.kernel_seconds == nearly(7.5));

    CHECK(c.predicted.step == 10.0);
    CHECK(c.predicted.exposed == nearly(2.0)); // 4 to 6
    CHECK(c.predicted.idle == nearly(3.0));
    CHECK(c.measured.step == 8.0);
    CHECK(c.measured.exposed == nearly(1.5)); // 4.5 to 6
    CHECK(c.measured.idle == nearly(1.0));
    REQUIRE(c.streams.size() == 2);
    CHECK(c.streams[0].stream == 7);
    CHECK(c.streams[1].communication == nearly(2.0));
}

TEST_CASE("profile beside prediction: means over devices, and kinds apart where no rule joins them") {
    Profile p;
    p.profile.devices = {"0", "1"};
    p.add("nccl", 0.0, 4.0, 20, 0);
    p.add("Memcpy", 1.0, 3.0, 7, 0); // a copy hides nothing
    p.add("nccl", 0.0, 1.0, 20, 1);
    const ProfileComparison c = p.compared();
    CHECK(c.devices == 2);
    CHECK(c.measured.exposed == nearly(2.5));
    CHECK(c.measured.idle == nearly(8.0 - 2.5));
    CHECK(named(c, "all_gather").kernels == 1.0);
    CHECK(named(c, "gemm").measured == 0.0); // no product ran: nothing joins the two kinds
    CHECK(named(c, "grouped_gemm").measured == 0.0);
    CHECK(named(c, "copy_to_host").measured == nearly(1.0));
}
