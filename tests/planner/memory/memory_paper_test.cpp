// Memory held to published tables: DeepSeek-V3 on 256 GB200 (arXiv 2603.07685 Table 3), the savings of its section 4.1.
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace moe;

namespace {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

using Fields = std::vector<std::pair<const char*, const char*>>;

// The paper's example: BF16, PP4 x VPP4 x EP64, sequence 4096, one sequence per micro-batch, before any technique.
plan::Plan example(const Fields& fields = {}) {
    plan::Plan plan;
    plan.model = std::make_shared<model::Model>(families::load_model("DeepSeek-V3"));
    plan.hardware = std::make_shared<machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    plan.stack = "mcore-2603.07685";
    plan.gpus = 256;
    plan.dp = 64;
    plan.gbs = 8192;
    plan.seq = 4096;
    for (const auto& [field, value] : Fields{{"pp", "4"},
                                             {"vpp", "4"},
                                             {"ep", "64"},
                                             {"schedule", "interleaved"},
                                             {"layout", "Et*4|(tttt|)*14tmL"},
                                             {"dispatcher", "hybridep"},
                                             {"memory_efficient_permutation", "off"}})
        plan::set_field(plan, field, value);
    for (const auto& [field, value] : fields) plan::set_field(plan, field, value);
    REQUIRE(plan::check_plan(plan).message == "");
    return plan;
}

// The paper's figures agree with the rank that keeps 15 chunks of four MoE layers, which is rank 2: 60 layers' worth.
// Its peak is rank 0 with 19 chunks.
constexpr int paper_rank = 2;

memory::MemoryBreakdown held(const plan::Plan& plan, int rank = paper_rank) {
    const program::Program program = lower::lower(plan, rank);
    return memory::memory_breakdown(program, memory::plan_memory(program));
}

double size(const memory::MemoryBreakdown& held, memory::MemoryClass c) {
    return static_cast<double>(held.classes[static_cast<std::size_t>(c)]) / gib;
}

double saved(const Fields& fields) { return size(held(example(fields)), memory::MemoryClass::saved); }

struct Row {
    const char* what;
    double published, ours;
};

void check_rows(const char* title, const std::vector<Row>& rows, double tolerance) {
    std::string text = fmt::format("{}\n  {:<52} {:>9} {:>8} {:>7}", title, "GiB", "published", "ours", "error");
    for (const Row& row : rows)
        text += fmt::format("\n  {:<52} {:>9.1f} {:>8.2f} {:>6.1f}%", row.what, row.published, row.ours,
                            100.0 * (row.ours / row.published - 1.0));
    MESSAGE(text);
    for (const Row& row : rows) {
        CAPTURE(row.what);
        CHECK(std::abs(row.ours / row.published - 1.0) <= tolerance);
    }
}

const Fields efficient{{"memory_efficient_permutation", "on"}};

Fields with(Fields fields, const Fields& more) {
    fields.insert(fields.end(), more.begin(), more.end());
    return fields;
}

} // namespace

TEST_CASE("DeepSeek-V3's 199.5 GiB by component, within 2 %") {
    const memory::MemoryBreakdown parts = held(example());
    REQUIRE(parts.kept == 15);
    const double states = size(parts, memory::MemoryClass::weights) + size(parts, memory::MemoryClass::gradients),
                 optimizer = size(parts, memory::MemoryClass::optimizer),
                 activations = size(parts, memory::MemoryClass::saved);
    // Table 3; "GB" there are GiB.
    check_rows("arXiv 2603.07685 Table 3",
               {{"weights and gradients", 36.4, states},
                {"main weights and optimizer states", 32.1, optimizer},
                {"activations", 131.0, activations},
                {"total", 199.5, states + optimizer + activations}},
               0.02);
    // Activations by class of module. The paper names three of them; the others are BF16 elements per token, 60 layers
    // of 4096 tokens: attention's input projections keep the two latents and their norms, the core its output (and
    // 4 bytes per head of its log-sum-exp), the experts' products their input (dispatch), FC1's output and FC2's.
    const auto module = [&](program::Module m) { return static_cast<double>(parts.saved.at(m)) / gib; };
    const auto elements = [](double per_token) { return 2.0 * per_token * 4096.0 * 60.0 / gib; };
    const double h = 7168, k = 8, f = 2048, heads = 128;
    check_rows(
        "by class of module (arithmetic on the architecture)",
        {{"norms: attention's and the MoE layer's output", elements(2 * h), module(program::Module::layernorm)},
         {"residual stream: two inputs a layer", elements(2 * h), module(program::Module::residual)},
         {"down projections and their norms", elements(2 * 1536 + 2 * 512 + 64), module(program::Module::attn_in)},
         {"MLA up projections (paper, recomputed: 30.4)", 30.4, module(program::Module::mla_up_proj)},
         {"attention's output", elements(heads * 128), module(program::Module::core_attn)},
         {"dispatched rows", elements(k * h), module(program::Module::dispatch)},
         {"FC1 and FC2 outputs (FC2 in the paper: 26.3)", elements(k * 2 * f) + 26.3, module(program::Module::experts)},
         {"SwiGLU's output", elements(k * f), module(program::Module::moe_act)},
         {"shared expert", elements(3 * f), module(program::Module::shared_experts)}},
        0.02);
    // No table names router logits and choices in FP32, a fifth of a per cent.
    CHECK(module(program::Module::router) < 0.3);
    const double named = std::accumulate(parts.saved.begin(), parts.saved.end(), 0.0,
                                         [](double sum, const auto& part) { return sum + part.second / gib; });
    CHECK(named == nearly(activations).epsilon(1e-9));
}

TEST_CASE("DeepSeek-V3: what each technique of section 4.1 saves, within 15 %") {
    // arXiv 2603.07685 section 4.1 and Table 6. Recomputation was measured with FP8-stored linear inputs: SwiGLU's
    // output of 3.8 is one byte per element, LayerNorm's 8.2 two FP8 copies for the down projections, one for the
    // shared expert and BF16 for the router.
    const Fields fp8 = with(efficient, {{"precision", "fp8-tensor"}});
    const double base = saved({}), without_fc2 = saved(efficient), stored_fp8 = saved(fp8);
    const auto recomputed = [&](const char* set) { return stored_fp8 - saved(with(fp8, {{"recompute", set}})); };
    const auto states = [](const Fields& fields) {
        return size(held(example(fields)), memory::MemoryClass::optimizer);
    };
    check_rows("arXiv 2603.07685 section 4.1",
               {{"memory-efficient permutation (4.1.2)", 26.3, base - without_fc2},
                {"FP8-stored linear inputs (4.1.3)", 16.0, without_fc2 - stored_fp8},
                {"recompute MLA up projections (4.1.4)", 30.4, recomputed("mla_up_proj")},
                {"recompute SwiGLU (4.1.4)", 3.8, recomputed("moe_act")},
                {"recompute LayerNorm (4.1.4)", 8.2, recomputed("layernorm")},
                {"all three (4.1.4)", 42.4, recomputed("layernorm+moe_act+mla_up_proj")},
                {"BF16 moments (4.1.6: 10 to 12)", 11.0, states({}) - states({{"optimizer", "adamw+bf16_moments"}})}},
               0.15);
    // Table 6: FP8 halves about 32 GB and FP4 takes three quarters of the same.
    const double stored_fp4 = saved(with(efficient, {{"precision", "nvfp4"}}));
    CHECK(without_fc2 - stored_fp4 > 1.35 * (without_fc2 - stored_fp8));
}

TEST_CASE("DeepSeek-V3: what offload saves") {
    // arXiv 2603.07685 Table 5: TP1 PP8 EP32 VPP4 MXFP8, 169 to 151 GB (10.7 %). The modules are not named; the input
    // of the activation, FC1's output, is the largest tensor of a layer.
    const auto peak = [](const char* offloaded) {
        plan::Plan plan = example(efficient);
        plan.dp = 32;
        for (const auto& [field, value] : Fields{{"pp", "8"},
                                                 {"ep", "32"},
                                                 {"layout", "Et|(tt|)*30mL"},
                                                 {"precision", "mxfp8"},
                                                 {"recompute", "mlp"},
                                                 {"offload", offloaded}})
            plan::set_field(plan, field, value);
        REQUIRE(plan::check_plan(plan).message == "");
        std::int64_t most = 0;
        for (int rank = 0; rank < plan.pp; ++rank)
            most = std::max(most, memory::plan_memory(lower::lower(plan, rank)).arena_bytes);
        return (static_cast<double>(most) + plan.hardware->context_bytes) / gib;
    };
    const double before = peak("none"), after = peak("moe_act");
    check_rows("arXiv 2603.07685 Table 5", {{"without offload", 169.0, before}, {"with offload", 151.0, after}}, 0.05);
    CHECK((before - after) / before == nearly(0.107).epsilon(0.15));
    // Section 4.1.6: optimizer states between steps, 15 to 20 GB, moments in BF16.
    const Fields bf16 = with(efficient, {{"optimizer", "adamw+bf16_moments"}});
    const double states = size(held(example(bf16)), memory::MemoryClass::optimizer) -
                          size(held(example(with(bf16, {{"offload", "optimizer"}}))), memory::MemoryClass::optimizer);
    CHECK(states >= 15.0 * 0.85);
    CHECK(states <= 20.0 * 1.15);
}

TEST_CASE("DeepSeek-V3 fits an H100 with everything on") {
    // arXiv 2603.07685 section 11: 199.5 GB come below 80. The plan of its Table 17: 1,024 H100, TP2 PP8 VPP4 EP64.
    plan::Plan plan = example(efficient);
    plan.hardware = std::make_shared<machine::Hardware>(machine::load_hardware("h100"));
    plan.gpus = 1024;
    plan.edp = 2;
    for (const auto& [field, value] : Fields{{"tp", "2"},
                                             {"pp", "8"},
                                             {"layout", "Et*3|(tt|)*29m|L"},
                                             {"precision", "fp8-blockwise"},
                                             {"recompute", "mla_up_proj+mlp"}})
        plan::set_field(plan, field, value);
    REQUIRE(plan::check_plan(plan).message == "");
    for (int rank = 0; rank < plan.pp; ++rank) {
        const program::Program program = lower::lower(plan, rank);
        CHECK(static_cast<double>(memory::plan_memory(program).arena_bytes) < 80e9);
    }
}

TEST_CASE("Saved activations of one layer follow the element counts of the field's estimators") {
    // The counts are per token in BF16 elements (Megatron-LM theoretical_memory_usage.py and the estimator of arXiv
    // 2603.07685's reference 101): GQA h + h + heads, keys and values + attention's output, once more the rotated
    // inputs where queries and keys are normed; MLA 2h + 2 q_lora + 2 kv_lora + rope + n (2 (nope + rope) + v) + n v;
    // dense SwiGLU 2h + 3f; MoE 2h + K h + 3 K f + 3 f_shared. FP32 statistics (log-sum-exp, router) come on top:
    // within 3 %.
    struct Case {
        const char* model;
        double elements; // per token
    };
    const auto gqa = [](double h, double heads, double kv, double d, bool norm) {
        return 2 * h + (norm ? 2.0 : 1.0) * (heads * d + 2 * kv * d) + heads * d;
    };
    const auto moe = [](double h, double k, double f) { return 2 * h + k * h + 3 * k * f; };
    for (const Case& c : std::vector<Case>{{"Qwen3-235B-A22B", gqa(4096, 64, 4, 128, true) + moe(4096, 8, 1536)},
                                           {"Mixtral-8x22B", gqa(6144, 48, 8, 128, false) + moe(6144, 2, 16384)},
                                           {"Llama3-70B", gqa(8192, 64, 8, 128, false) + 2 * 8192 + 3 * 28672.0},
                                           {"DeepSeek-V3", 2 * 7168 + 2 * 1536 + 2 * 512 + 64 + 128 * (2 * 192 + 128) +
                                                               128 * 128 + moe(7168, 8, 2048) + 3 * 2048.0}}) {
        CAPTURE(c.model);
        plan::Plan plan = example(efficient);
        plan.model = std::make_shared<model::Model>(families::load_model(c.model));
        plan.pp = plan.vpp = plan.ep = 1;
        plan.dp = plan.edp = plan.gpus;
        plan.layout.clear();
        plan.schedule = plan::ScheduleKind::one_f_one_b;
        const int kind = plan.model->layers.back();
        const memory::SegmentMemory layer =
            memory::segment_memory(lower::lower_segment(plan, lower::SegmentKind::layer, kind));
        CHECK(static_cast<double>(layer.saved) / (2.0 * 4096.0) == nearly(c.elements).epsilon(0.03));
    }
}
