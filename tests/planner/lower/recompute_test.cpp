// Recompute by operators: which products are repeated, what is kept in their place, and what stays.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <string>

using namespace moe;

namespace {

plan::Plan plan_of(const std::string& model, unsigned recompute) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "torchtitan";
    plan.seq = 8192;
    plan.gbs = 1;
    plan.recompute = recompute;
    return plan;
}

struct Sum {
    int count = 0;
    double flops = 0.0;
};
// Ops of one layer that run again in its backward.
Sum repeated(const plan::Plan& plan, program::OpKind kind) {
    const program::Program program = lower::lower(plan, 0);
    Sum sum;
    for (const program::Op& op : program.templates[1].ops)
        if (op.layer == 5 && op.kind == kind && op.phase == program::Phase::recompute)
            ++sum.count, sum.flops += op.flops;
    return sum;
}

std::int64_t saved(const plan::Plan& plan) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)];
}

} // namespace

TEST_CASE("recompute = operators: every second projection of a dense layer, as PyTorch counts them") {
    using namespace plan::recompute;
    const plan::Plan none = plan_of("Llama3-8B", 0), some = plan_of("Llama3-8B", operators),
                     all = plan_of("Llama3-8B", full);
    REQUIRE(plan::check_plan(some).message == "");
    // In the order q k v o gate up down: k, o and up are repeated; the core is not.
    const double tokens = 8192.0, h = 4096.0;
    const Sum products = repeated(some, program::OpKind::gemm);
    CHECK(products.count == 3);
    CHECK(products.flops == doctest::Approx(2 * tokens * h * (1024 + 4096 + 14336)));
    CHECK(repeated(some, program::OpKind::attention).count == 0);
    CHECK(repeated(some, program::OpKind::rmsnorm).count > 0);
    CHECK(repeated(all, program::OpKind::attention).count == 1);
    CHECK(saved(all) < saved(some));
    CHECK(saved(some) < saved(none));
    // Kept of a layer besides its input: q, v, the core's output with its log-sum-exp, gate. The norms' scales and the
    // embedding, the head and the rest of the model are in both.
    const double kept = tokens * 2 * (h + 1024 + h + 14336) + tokens * 32 * 4;
    CHECK(static_cast<double>(saved(some) - saved(all)) == doctest::Approx(32 * kept).epsilon(0.02));
}

TEST_CASE("recompute = operators: experts are repeated, exchanges are not; it stands alone") {
    using namespace plan::recompute;
    plan::Plan plan = plan_of("Qwen3-30B-A3B", operators);
    plan.gpus = plan.dp = plan.ep = 8;
    plan.gbs = 8;
    REQUIRE(plan::check_plan(plan).message == "");
    CHECK(repeated(plan, program::OpKind::grouped_gemm).count >= 1);
    CHECK(repeated(plan, program::OpKind::all_to_all_rows).count == 0);
    plan.recompute = operators | layernorm;
    CHECK(plan::check_plan(plan).message.find("name it alone") != std::string::npos);
    CHECK(to_string(operators) == "operators");
    CHECK(from_string("operators") == operators);
}
