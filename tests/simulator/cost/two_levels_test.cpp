// Dispatch in two levels is priced by what it moves: over the NIC and over NVLink as many bytes as one op over both.
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/program/program.hpp"
#include "simulator/cost/collective.hpp"
#include "tests/simulator/cost/priced.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

TEST_CASE("two levels move over NIC and NVLink what one exchange by tokens is priced with") {
    Priced priced("moe-plan", machine::load_hardware("h100"), 32);
    priced.plan.seq = 4096;
    priced.plan.gbs = 32;
    priced.plan.ep = 32, priced.plan.edp = 1;
    priced.plan.dispatcher = plan::Dispatcher::hybridep;
    const std::size_t routed = priced.plan.model->kinds.size() - 1;
    const model::Moe& moe = *priced.plan.model->kinds[routed].moe;
    const cost::CostModel model(priced.plan, priced.stack, priced.machine);
    const program::Program program =
        lower::lower_segment(priced.plan, lower::SegmentKind::layer, static_cast<int>(routed));
    const std::vector<program::Op>& forward = program.templates[0].ops;
    const auto find = [&](program::OpKind kind) {
        return *std::find_if(forward.begin(), forward.end(), [&](const program::Op& op) {
            return op.kind == kind && std::get<program::RowsAttr>(op.attr).cols == 2048;
        });
    };
    const program::Op slots = find(program::OpKind::all_to_all_slots), inner = find(program::OpKind::dispatch_tokens);
    // The price of one exchange over both, by one link at a time.
    const cost::GroupLinks both = model.links(emit::groups::dispatch);
    REQUIRE(both.placement == cost::Placement{32, 4, 8});
    constexpr double token = 2048.0 * 2, tokens = 4096.0, no_time = 1e30;
    const auto seconds = [&](stack::LinkShares shares) {
        return cost::token_exchange_seconds(both, shares, tokens * token, moe) - both.routes.exchange.latency;
    };
    const double nic = seconds({no_time, 1.0}) * both.routes.domains.bandwidth,
                 nvlink = seconds({1.0, no_time}) * both.nvlink.bandwidth;

    // Over the NIC: tokens that go to other domains, of which three are not this rank's.
    const double sent = program.tensors[static_cast<std::size_t>(slots.in[0])].expected_rows;
    CHECK(sent * token * 3.0 / 4.0 == nearly(nic));
    // A GPU's host knows no counts: whole slots go, of all tokens for each domain.
    CHECK(slots.bytes == 4 * tokens * token);
    const cost::GroupLinks outer = model.links(emit::groups::expert_outer);
    CHECK(outer.placement == cost::Placement{4, 4, 1});
    CHECK(priced(slots, program).device ==
          nearly(cost::all_to_all_seconds(outer, slots.bytes) + priced.stack.costs.kernel_seconds));

    // Over NVLink: one row to each rank that has some of the token's experts.
    priced.stack.costs.dispatcher.at("hybridep") = {1.0, 1.0};
    const cost::GroupLinks within = model.links(emit::groups::expert_inner);
    CHECK(within.placement == cost::Placement{8, 1, 8});
    CHECK((priced(inner, program).device - priced.stack.costs.kernel_seconds - within.routes.exchange.latency) *
              within.nvlink.bandwidth ==
          nearly(nvlink));
}
