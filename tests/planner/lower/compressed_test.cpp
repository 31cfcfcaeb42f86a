// DeepSeek-V4's attention: its products and parameters as the model counts them, what is read and picked, TP and CP.
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <string>

using namespace moe;

namespace {

constexpr double h = 4096.0, heads = 64.0, wide = 512.0, latent = 1024.0, groups = 8.0, narrow = 1024.0; // of a layer
constexpr double index_heads = 64.0, index_wide = 128.0;

plan::Plan plan_of(std::int64_t seq = 4096) {
    plan::Plan plan = published_plan("DeepSeek-V4-Flash", "gb200-nvl72", "bridge-26.08");
    plan.gpus = plan.dp = plan.edp = 64;
    plan.gbs = 64;
    plan.seq = seq;
    plan.precision = machine::Precision::mxfp8;
    return plan;
}

// Of the first layer of blocks of `ratio`, 0: of none.
std::vector<const program::Op*> ops_of(const program::Program& program, const model::Model& model, int ratio,
                                       std::size_t part) {
    std::vector<const program::Op*> ops;
    int layer = 0;
    while (model.kind_of(static_cast<std::size_t>(layer)).attention.compress_ratio != ratio) ++layer;
    const auto inside = [](program::Module m) {
        return m == program::Module::attn_in || m == program::Module::mla_up_proj || m == program::Module::core_attn ||
               m == program::Module::attn_out;
    };
    for (const program::Op& op : program.templates[part].ops)
        if (op.layer == layer && inside(op.module)) ops.push_back(&op);
    return ops;
}

double products(const std::vector<const program::Op*>& ops) {
    double flops = 0.0;
    for (const program::Op* op : ops) flops += op->kind == program::OpKind::gemm ? op->flops : 0.0;
    return flops;
}

int count(const std::vector<const program::Op*>& ops, program::OpKind kind) {
    return static_cast<int>(
        std::count_if(ops.begin(), ops.end(), [kind](const program::Op* op) { return op->kind == kind; }));
}

double products_of(double ratio) { // multiply-accumulates of a token
    const double queries = latent * (h + heads * wide), output = heads * wide * narrow + groups * narrow * h;
    const double pooled = ratio == 0 ? 0.0 : ratio == 4 ? 4.0 * h * wide : 2.0 * h * wide;
    const double indexer = latent * index_heads * index_wide + h * index_heads + 4.0 * h * index_wide;
    return queries + h * wide + output + pooled + (ratio == 4 ? indexer : 0.0);
}

} // namespace

TEST_CASE("compressed attention: products of a layer are the model's, keys those that it sees") {
    const plan::Plan plan = plan_of();
    const program::Program program = lower::lower(plan, 0);
    for (const int ratio : {0, 4, 128}) {
        CAPTURE(ratio);
        const std::vector<const program::Op*> forward = ops_of(program, *plan.model, ratio, 0);
        CHECK(products(forward) == nearly(2.0 * 4096 * products_of(ratio)));
        REQUIRE(count(forward, program::OpKind::attention) == 1);
        CHECK(count(forward, program::OpKind::pick_keys) == (ratio == 4 ? 1 : 0));
        // Queries, keys and the output turn, and the indexer's queries.
        CHECK(count(forward, program::OpKind::rope) == (ratio == 4 ? 4 : 3));
        // A window of 128; 512 of 1,024 blocks, of which a query has 384 before it in the mean; or all 32.
        const double seen = ratio == 0 ? 128.0 : ratio == 4 ? 128.0 + 384.0 : 128.0 + 32.0;
        for (const program::Op* op : forward)
            if (op->kind == program::OpKind::attention)
                CHECK(op->flops == nearly(2.0 * 4096 * seen * heads * 2.0 * wide));
        const std::vector<const program::Op*> backward = ops_of(program, *plan.model, ratio, 1);
        CHECK(count(backward, program::OpKind::attention_grad) == 1);
        CHECK(count(backward, program::OpKind::pick_keys_grad) == (ratio == 4 ? 1 : 0));
    }
}

TEST_CASE("compressed attention: all parameters but positions and sinks are the model's") {
    const plan::Plan plan = plan_of();
    const program::Program program = lower::lower(plan, 0);
    double declared = 0.0;
    for (const program::Parameter& p : program.parameters)
        if (p.name.find("self_attn.") != std::string::npos && p.name.find("layers.2.") != std::string::npos)
            declared += static_cast<double>(p.rows) * static_cast<double>(p.cols);
    CHECK(declared == nearly(products_of(4)).epsilon(1e-4));
}

TEST_CASE("compressed attention: the product by groups and those of blocks stay in BF16, queries are made again") {
    plan::Plan plan = plan_of();
    const auto narrow_products = [](const std::vector<const program::Op*>& ops, const program::Program& program) {
        double flops = 0.0;
        for (const program::Op* op : ops)
            if (op->kind == program::OpKind::gemm &&
                program.tensors[static_cast<std::size_t>(op->in[0])].dtype != program::Dtype::bf16)
                flops += op->flops;
        return flops;
    };
    const program::Program program = lower::lower(plan, 0);
    const double bf16 = heads * wide * narrow + 4.0 * h * wide + h * index_heads + 4.0 * h * index_wide;
    CHECK(narrow_products(ops_of(program, *plan.model, 4, 0), program) == nearly(2.0 * 4096 * (products_of(4) - bf16)));
    const std::vector<const program::Op*> kept = ops_of(program, *plan.model, 4, 1);
    plan.recompute = plan::recompute::mla_up_proj;
    const program::Program again = lower::lower(plan, 0);
    const std::vector<const program::Op*> made = ops_of(again, *plan.model, 4, 1);
    CHECK(products(made) - products(kept) == nearly(2.0 * 4096 * latent * heads * wide));
    CHECK(count(made, program::OpKind::rope) == count(kept, program::OpKind::rope) + 1);
}

TEST_CASE("compressed attention: TP splits heads and groups, CP brings all keys to its queries") {
    plan::Plan plan = plan_of();
    plan.tp = 2, plan.cp = 2;
    plan.dp = 16;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    const std::vector<const program::Op*> forward = ops_of(program, *plan.model, 4, 0);
    int gathered = 0;
    for (const program::Op* op : forward) {
        gathered += op->kind == program::OpKind::all_gather && op->group == emit::groups::context;
        if (op->kind != program::OpKind::attention) continue;
        const auto& attr = std::get<program::AttentionAttr>(op->attr);
        CHECK(attr.heads == 32);
        CHECK(attr.seq_q == 2048);
        CHECK(op->flops == nearly(2.0 * 2048 * 512 * 32 * 2 * wide));
    }
    CHECK(gathered == 2); // keys, and those of the indexer
    plan.tp = 16, plan.cp = 1, plan.dp = 4;
    CHECK(plan::check_plan(plan).message.find("o_groups") != std::string::npos);
}
