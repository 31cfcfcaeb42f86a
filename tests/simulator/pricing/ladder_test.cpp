// The ladder of optimisations of DeepSeek-V3 on 256 GB200 from 494 to 970 TFLOPS, one plan choice or feature at a time.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

using namespace moe;

namespace {

// The state of a rung: the plan, the features that the software still lacks, and how well DeepEP is set up.
struct State {
    plan::Plan plan;
    std::vector<std::string> lacks;
    double deepep_tuning = 0.7; // of the bandwidth that it reaches with its channels and SMs tuned; an estimate
};

struct Rung {
    const char* name;
    double published; // TFLOPS/GPU
    std::function<void(State&)> climb;
};

// Megatron-LM docs/discussions/deepseek-v3-gb200-optimization: MXFP8, TP1 PP8 VPP4 EP32, GBS 2048, no MTP stage. The
// source's model FLOPs are 250.4 GF/token with the router, ours 249.8 without.
State base() {
    State s;
    auto model = std::make_shared<model::Model>(families::load_model("DeepSeek-V3"));
    model->mtp.clear();
    s.plan.model = std::move(model);
    s.plan.hardware = std::make_shared<machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    s.plan.stack = "mcore-2603.07685";
    s.plan.gpus = 256;
    s.plan.dp = 32;
    s.plan.gbs = 2048;
    s.plan.seq = 4096;
    for (const auto& [field, value] :
         std::vector<std::pair<const char*, const char*>>{{"pp", "8"},
                                                          {"vpp", "4"},
                                                          {"ep", "32"},
                                                          {"schedule", "interleaved"},
                                                          {"layout", "Et|(tt|)*30L"},
                                                          {"precision", "mxfp8"},
                                                          {"dispatcher", "alltoall"},
                                                          {"cuda_graph", "none"},
                                                          {"recompute", "mlp+mla_up_proj"},
                                                          {"optimizer", "adamw+bf16_moments"}})
        plan::set_field(s.plan, field, value);
    s.lacks = {"fused_permute",       "fused_router", "lean_recompute",     "bound_cores",
               "programmatic_launch", "lean_host",    "fused_norm_quantize"};
    return s;
}

auto gains(const char* feature) {
    return [feature](State& s) { std::erase(s.lacks, std::string(feature)); };
}
auto sets(const char* field, const char* value) {
    return [field, value](State& s) { plan::set_field(s.plan, field, value); };
}

const std::vector<Rung>& ladder() {
    static const std::vector<Rung> rungs{
        {"baseline: NCCL all-to-all", 494.5, [](State&) {}},
        {"fused permute, batched scale allocation", 529.6, gains("fused_permute")},
        {"router fusion", 540.0, gains("fused_router")},
        {"DeepEP", 566.1, sets("dispatcher", "deepep")},
        {"fine-grained FP8 recompute, none of MLA up", 610.7,
         [](State& s) {
             gains("lean_recompute")(s);
             plan::set_field(s.plan, "recompute", "mlp+moe_act");
         }},
        {"CUDA graphs: attention, router, preprocessing", 663.3, sets("cuda_graph", "attn+moe_router+moe_preprocess")},
        {"DeepEP tuning", 691.5, [](State& s) { s.deepep_tuning = 1.0; }},
        {"processes bound to cores", 762.1, gains("bound_cores")},
        {"programmatic launch, scale swizzle fused", 797.7, gains("programmatic_launch")},
        {"graphs hold the shared expert", 829.9, sets("cuda_graph", "attn+moe_router+moe_preprocess+shared_experts")},
        {"HybridEP", 943.6, sets("dispatcher", "hybridep")},
        {"less work of the host", 956.2, gains("lean_host")},
        {"quantization fused into norms", 970.0, gains("fused_norm_quantize")},
    };
    return rungs;
}

double predict(const State& s) {
    std::string name = s.plan.stack;
    for (const std::string& feature : s.lacks) name += ",no-" + feature;
    stack::Stack stack = stack::load_stack(name, *s.plan.hardware);
    stack.costs.dispatcher.at("deepep").nvlink *= s.deepep_tuning;
    REQUIRE(plan::check_plan(s.plan).message == "");
    REQUIRE(stack::check_offers(s.plan, stack).message == ""); // Bridge refuses DeepEP on GB200, the paper measured it
    return pricing::FastEstimator(s.plan.hardware, stack).estimate(s.plan).tflops_per_gpu;
}

double kendall_tau(const std::vector<double>& a, const std::vector<double>& b) {
    double score = 0.0;
    int pairs = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        for (std::size_t j = i + 1; j < a.size(); ++j, ++pairs) {
            const double product = (a[i] - a[j]) * (b[i] - b[j]);
            score += product > 0.0 ? 1.0 : product < 0.0 ? -1.0 : 0.0;
        }
    return score / pairs;
}

} // namespace

TEST_CASE("ladder: no rung loses, the order of the gains (tau 0.69), the top within 15 %") {
    State state = base();
    std::vector<double> published, predicted;
    std::string text = fmt::format("{:<48} {:>9} {:>7} {:>9} {:>7}", "rung", "published", "gain", "predicted", "gain");
    double before = 0.0, published_before = 0.0, top = 0.0;
    for (const Rung& rung : ladder()) {
        rung.climb(state);
        top = predict(state);
        const bool first = before == 0.0;
        text += fmt::format("\n{:<48} {:>9.1f} {:>7} {:>9.1f} {:>7}", rung.name, rung.published,
                            first ? "" : fmt::format("{:+.1f}", rung.published - published_before), top,
                            first ? "" : fmt::format("{:+.1f}", top - before));
        if (!first) {
            published.push_back(rung.published - published_before);
            predicted.push_back(top - before);
        }
        before = top;
        published_before = rung.published;
    }
    const double tau = kendall_tau(published, predicted);
    MESSAGE(text << fmt::format("\nKendall tau of the gains {:.2f}", tau));
    // Where tokens on their way bound the step already, a rung that spares the host gains nothing.
    int gains = 0;
    for (std::size_t i = 0; i < predicted.size(); ++i) {
        CAPTURE(ladder()[i + 1].name);
        CHECK(predicted[i] >= 0.0);
        gains += predicted[i] > 0.0 ? 1 : 0;
    }
    CHECK(gains >= static_cast<int>(predicted.size()) - 1);
    CHECK(tau >= 0.69);
    CHECK(top == nearly(970.0).epsilon(0.15));
}
