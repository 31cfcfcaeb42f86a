// Rows of published runs become plans: every column has its effect, and what cannot be planned says why.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "simulator/published/run_plan.hpp"
#include "simulator/published/run_recipe.hpp"
#include "tests/simulator/published/published_run.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace {

// DeepSeek-V3 as Megatron-Bridge 26.08 ran it on 256 GB200.
moe::published::Run deepseek() {
    moe::published::Run run = moe::test::published_run({"Megatron-Bridge docs/performance-summary.md", "26.08"},
                                                       {"DeepSeek-V3", "GB200", "MXFP8"}, {256, 4096, 4096, 1, 4});
    run.run_id = "x";
    run.mbs = 1;
    run.vpp = 4;
    run.ep = 64;
    run.recompute_modules = "mla_up_proj";
    run.offload_modules = "none";
    run.cuda_graph = "full_iteration:full_iteration";
    run.dispatcher = "hybridep";
    run.ep_overlap = true;
    run.pipeline_layout = "Et*4|(tttt|)*14tmL";
    run.optimizer = "adam;precision_aware;exp_avg=bfloat16;exp_avg_sq=bfloat16";
    run.mtp_layers = 1;
    run.mapping_check = "ok";
    run.tflops_std = 1277.1;
    run.gflop_per_token_std = 259.993;
    run.other_settings = "paged_stash;expert_rank_capacity=1.5;fp8_lm_head";
    return run;
}

// A dense row with nothing but its mapping.
moe::published::Run llama() {
    moe::published::Run run =
        moe::test::published_run({"NVIDIA/dgxc-benchmarking v25.02.02 llama3.1/README_405b.md", "v25.02.02"},
                                 {"Llama3.1-405B", "H100", "BF16"}, {1024, 512, 8192, 8, 16});
    run.vpp = 8;
    run.tflops_per_gpu = 400.0;
    return run;
}

moe::published::PlannedRun planned(const moe::published::Run& run) {
    static moe::published::RunPlanner planner(moe::machine::load_coefficients(), {}); // blank cells stay blank
    return planner.plan(run);
}

std::string skipped(const moe::published::Run& run) { return planned(run).skipped; }

} // namespace

TEST_CASE("a complete recipe becomes its very plan") {
    const moe::published::PlannedRun p = planned(deepseek());
    REQUIRE(p.skipped == "");
    CHECK(p.plan.stack == "bridge-26.08");
    CHECK(p.plan.hardware->name == "gb200-nvl72");
    CHECK(p.plan.dp == 64);
    CHECK(p.plan.edp == 1);
    CHECK(p.plan.cp == 1);
    CHECK(p.plan.etp == 1);
    CHECK(p.plan.schedule == moe::plan::ScheduleKind::interleaved);
    CHECK(p.plan.precision == moe::machine::Precision::mxfp8);
    CHECK(p.plan.recompute == moe::plan::recompute::mla_up_proj);
    CHECK(p.plan.cuda_graph == moe::plan::CudaGraph::full);
    CHECK(p.plan.dispatcher == moe::plan::Dispatcher::hybridep);
    CHECK(p.plan.ep_overlap);
    CHECK(p.plan.optimizer.narrow());
    CHECK(p.plan.capacity == nearly(1.5));
    CHECK(p.plan.layout == "Et*4|(tttt|)*14tmL");
    CHECK(p.plan.model->mtp.size() == 1);
    CHECK(p.flops_per_token == nearly(259.993e9));
    CHECK_FALSE(p.open_mbs);
    CHECK_FALSE(p.open_recompute);
    CHECK(p.kind == "MoE");
    CHECK(p.warnings.empty());
    CHECK(moe::plan::check_plan(p.plan).message == "");
}

TEST_CASE("nothing depends on the run's name") {
    moe::published::Run run = deepseek();
    const std::string before = moe::plan::plan_to_json(planned(run).plan);
    run.run_id = "MB-25.09-OTHER";
    CHECK(moe::plan::plan_to_json(planned(run).plan) == before);
}

TEST_CASE("recipe columns switch the plan, blank ones give the usual choice") {
    moe::published::Run run = deepseek();
    run.cuda_graph = "none (scope listed but impl off: full)";
    run.ep_overlap = false;
    run.dispatcher = "alltoall(model default)";
    run.recompute_modules = "mlp+mla_up_proj";
    run.optimizer = "adamw";
    run.other_settings.clear();
    moe::published::PlannedRun p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.cuda_graph == moe::plan::CudaGraph::none);
    CHECK_FALSE(p.plan.ep_overlap);
    CHECK(p.plan.dispatcher == moe::plan::Dispatcher::alltoall);
    CHECK(p.plan.recompute == (moe::plan::recompute::mlp | moe::plan::recompute::mla_up_proj));
    CHECK_FALSE(p.plan.optimizer.narrow());
    CHECK(p.plan.capacity == 0.0);

    run = deepseek();
    run.cuda_graph = run.dispatcher = run.recompute_modules = "";
    run.ep_overlap.reset();
    run.mbs.reset();
    p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.cuda_graph == moe::plan::CudaGraph::full); // 26.08 on Blackwell
    CHECK(p.plan.dispatcher == moe::plan::Dispatcher::hybridep);
    CHECK(p.plan.ep_overlap);
    CHECK(p.open_mbs);
    CHECK(p.open_recompute);

    run.cuda_graph = "transformer_engine:attn+moe_router+moe_preprocess";
    run.offload_modules = "expert_fc1+moe_act";
    p = planned(run);
    REQUIRE(p.skipped == "");
    using moe::plan::CudaGraph;
    const CudaGraph routing = CudaGraph::moe_router | CudaGraph::shared_experts | CudaGraph::moe_preprocess;
    CHECK(p.plan.cuda_graph == (CudaGraph::attn | routing));
    run.cuda_graph = "transformer_engine:moe_router+moe_preprocess"; // attention stays outside
    CHECK(planned(run).plan.cuda_graph == routing);
    run.cuda_graph = "enable_cuda_graph(per layer)";
    CHECK(planned(run).plan.cuda_graph == CudaGraph::partial);
    CHECK(p.plan.offload == (moe::plan::offload::expert_fc1 | moe::plan::offload::moe_act));
    run.offload_modules = "optimizer states+expert_fc1";
    CHECK(planned(run).plan.offload == (moe::plan::offload::optimizer | moe::plan::offload::expert_fc1));
    run.offload_modules = "layer-activations(40 layers)";
    p = planned(run);
    CHECK(p.plan.offload == 0);
    REQUIRE(p.warnings.size() == 1);
    CHECK(p.warnings[0].find("layer-activations") != std::string::npos);
}

TEST_CASE("precisions of single modules, scaling and gradients follow the recipe's words") {
    moe::published::Run run = deepseek();
    run.other_settings = "paged_stash";
    run.optimizer = "adam";
    moe::published::PlannedRun p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK_FALSE(p.plan.attention_precision.has_value());
    CHECK_FALSE(p.plan.head_precision.has_value());
    CHECK(p.plan.gradients == moe::machine::Precision::bf16); // the release's usual choice
    CHECK_FALSE(p.plan.paged_stash);                          // no capacity to page
    run.other_settings = "paged_stash;expert_rank_capacity=1.5";
    run.optimizer = "adam;main_grads=fp32";
    p = planned(run);
    CHECK(p.plan.gradients == moe::machine::Precision::fp32);
    CHECK(p.plan.capacity == 1.5);
    CHECK(p.plan.paged_stash);
    run.other_settings = "paged_stash;fp8_attention;fp8_lm_head";
    run.optimizer = "adam;precision_aware;exp_avg=bfloat16;exp_avg_sq=bfloat16;main_grads=bfloat16;main_params=float32";
    p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.core_attention() == moe::machine::Precision::fp8_tensor);
    CHECK(p.plan.head() == moe::machine::Precision::mxfp8);
    CHECK(p.plan.gradients == moe::machine::Precision::bf16);
    CHECK(p.plan.fp8_scaling == moe::plan::Fp8Scaling::current);
    run = deepseek();
    run.precision = "FP8-delayed";
    p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.fp8_scaling == moe::plan::Fp8Scaling::delayed);
}

TEST_CASE("mtp_layers overrides the model's own count, and the layout follows") {
    moe::published::Run run = deepseek();
    run.mtp_layers = 0;
    const moe::published::PlannedRun p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.model->mtp.empty());
    CHECK(p.plan.layout == "Et*4|(tttt|)*14tL");
    run.gflop_per_token_std.reset();
    CHECK(planned(run).flops_per_token == nearly(249.81e9).epsilon(1e-3)); // GFLOP/token without MTP
    moe::published::Run dense = llama();
    dense.mtp_layers = 1;
    CHECK(skipped(dense).find("no multi-token prediction") != std::string::npos);
}

TEST_CASE("a blank layout counts embedding and loss as layers only where the layers alone do not divide") {
    const auto stages_of = [](const moe::published::Run& run) { return planned(run).plan.layout; };
    const moe::published::Run run = llama(); // 126 layers on 128 stages: (126 + 2) / 128 = 1
    REQUIRE(planned(run).skipped == "");
    CHECK(stages_of(run) == "E|(t|)*126L");
    moe::published::Run nine = run; // 126 / 63 = 2: even without the ends
    nine.pp = 9;
    nine.vpp = 7;
    nine.gpus = 576;
    nine.gbs = 576;
    REQUIRE(planned(nine).skipped == "");
    CHECK(stages_of(nine) == "");
    moe::published::Run dualpipe = deepseek();
    dualpipe.pipeline_layout = "DualPipe";
    CHECK(skipped(dualpipe).find("two copies of its weights") != std::string::npos);
    dualpipe.pipeline_layout = "standalone embedding";
    const moe::published::PlannedRun p = planned(dualpipe);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.layout == "");
    CHECK(std::count_if(p.warnings.begin(), p.warnings.end(), [](const std::string& warning) {
              return warning.find("is no layout string") != std::string::npos;
          }) == 1);
}

TEST_CASE("a recipe that breaks a rule as recorded keeps its price and is told") {
    moe::published::Run run = deepseek();
    run.cuda_graph = "full_iteration", run.other_settings.clear();
    const moe::published::PlannedRun full = planned(run);
    REQUIRE(full.skipped == "");
    CHECK(std::any_of(full.warnings.begin(), full.warnings.end(), [](const std::string& warning) {
        return warning.find("breaks a rule of megatron-core: cuda_graph full of a MoE") != std::string::npos;
    }));
    run.other_settings = "expert_rank_capacity=1.5";
    for (const std::string& warning : planned(run).warnings) CHECK(warning.find("breaks a rule") == std::string::npos);
}

TEST_CASE("recompute of hyper-connections is read and told") {
    moe::published::Run run = deepseek();
    for (const auto& [words, set] : std::vector<std::pair<std::string, unsigned>>{
             {"mhc", 0U},
             {"mla_up_proj+mhc", moe::plan::recompute::mla_up_proj},
             {"mhc+moe_act+mla_up_proj", moe::plan::recompute::moe_act | moe::plan::recompute::mla_up_proj}}) {
        CAPTURE(words);
        run.recompute_modules = words;
        const moe::published::PlannedRun p = planned(run);
        REQUIRE(p.skipped == "");
        CHECK(p.plan.recompute == set);
        REQUIRE(p.warnings.size() == 1);
        CHECK(p.warnings[0].find("mhc is not priced") != std::string::npos);
    }
}

TEST_CASE("chunks of a rank are bounded by the layers, not by the GPUs; DeepEP runs on B200") {
    moe::published::Run run = deepseek(); // 61 layers and MTP
    run.system = "B200", run.gpus = 16, run.pp = 2, run.vpp = 24, run.ep = 8, run.mtp_layers = 0;
    run.pipeline_layout = "Et*2|(t|)*14(t*1|)*32tL"; // 48 chunks: 2 + 14 + 32 + 1 layers are no 61
    CHECK(skipped(run).find("a degree of") == std::string::npos);
    run.model = "Llama3-8B", run.pipeline_layout = "", run.ep.reset(), run.vpp = 16, run.mtp_layers.reset();
    run.gpus = 8, run.recompute_modules = "none", run.other_settings = "";
    run.cuda_graph = "none", run.dispatcher = "", run.ep_overlap.reset();
    const moe::published::PlannedRun p = planned(run); // 32 layers: 16 chunks of either rank on 8 GPUs
    CHECK(p.skipped == "");
    CHECK(p.plan.vpp == 16);
    run.vpp = 24;
    CHECK(skipped(run).find("a degree of") == std::string::npos);
    CHECK(skipped(run) != "");

    for (const char* release : {"25.09", "25.11", "26.02", "26.04", "26.06", "26.08"}) {
        CAPTURE(release);
        moe::published::Run deepep = deepseek();
        deepep.release = release, deepep.system = "B200", deepep.ep = 32, deepep.pp = 8, deepep.vpp = 2;
        deepep.dispatcher = "deepep", deepep.cuda_graph = "none", deepep.ep_overlap = false;
        deepep.other_settings = "";
        const moe::published::PlannedRun of_deepep = planned(deepep);
        CHECK(of_deepep.skipped == "");
        CHECK(of_deepep.plan.dispatcher == moe::plan::Dispatcher::deepep);
    }
}

TEST_CASE("NCCL EP by the words of its sources") {
    for (const char* word : {"ncclep", "NCCL EP", "nccl_ep", "NCCL EP (64 ranks)"}) {
        CAPTURE(word);
        moe::published::Run run = deepseek();
        run.dispatcher = word;
        // The newest stack before a release that none lists is that of the row, and 26.08 does not offer it.
        CHECK(skipped(run).find("dispatcher ncclep: stack bridge-26.08 offers") != std::string::npos);
    }
}

TEST_CASE("rows with dropped tokens have an expert capacity") {
    moe::published::Run run = deepseek();
    run.cuda_graph = "none", run.other_settings.clear();
    run.moe_balance = "token-drop, capacity 1.0", run.dispatcher = "alltoall";
    const moe::plan::Plan drops = planned(run).plan;
    CHECK(drops.capacity == 0.0);
    CHECK(drops.router.expert_capacity == 1.0);
    CHECK(drops.router.pad_to_capacity);
    run.dispatcher = "HybridEP"; // moves tokens, not rows: nothing to fill up
    CHECK_FALSE(planned(run).plan.router.pad_to_capacity);
}

TEST_CASE("rows that cannot be planned say why") {
    const auto reason = [](auto change) {
        moe::published::Run run = deepseek();
        change(run);
        return skipped(run);
    };
    CHECK(reason([](moe::published::Run& r) { r.status = "superseded"; }) == "status is superseded");
    CHECK(reason([](moe::published::Run& r) { r.gbs.reset(); }) == "no gbs");
    CHECK(reason([](moe::published::Run& r) { r.seq_len.reset(); }) == "no seq_len");
    CHECK(reason([](moe::published::Run& r) { r.tp.reset(); }).find("mapping is incomplete") == 0);
    CHECK(reason([](moe::published::Run& r) { r.tflops_std.reset(); }) == "no TFLOPS published");
    CHECK(reason([](moe::published::Run& r) { r.mapping_check = "GBS not a multiple of DPxMBS=16"; }).find("GBS not") ==
          0);
    CHECK(reason([](moe::published::Run& r) { r.model = "GPT3-20B"; }).find("unknown model") == 0);
    CHECK(reason([](moe::published::Run& r) { r.model = "../../etc/passwd"; }).find("must be the name") !=
          std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.system = "B200(power-limited)"; }).find("clocks") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.system = "Z9000"; }).find("unknown hardware") == 0);
    CHECK(reason([](moe::published::Run& r) { r.system = "TPUv9"; }).find("accelerator of Google") !=
          std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.precision = "INT3"; }).find("int3") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.dispatcher = "pigeon"; }).find("pigeon") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.recompute_modules = "moe+soup"; }).find("soup") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.cuda_graph = "sometimes"; }).find("sometimes") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.pp = 7; }).find("impossible mapping") == 0);
    CHECK(reason([](moe::published::Run& r) { r.ep = 1000000000; }).find("impossible mapping") == 0);
    CHECK(reason([](moe::published::Run& r) { r.ep = 96; }) != "");
    CHECK(reason([](moe::published::Run& r) {
              r.gpus = r.pp = r.vpp = 1000000000;
              r.pipeline_layout.clear();
          }) != "");
    CHECK(reason([](moe::published::Run& r) { r.gbs = 4095; }).find("gbs") != std::string::npos);
    CHECK(reason([](moe::published::Run& r) { r.pipeline_layout = "Et|L"; }).find("layout") != std::string::npos);
}

TEST_CASE("precisions by their published names") {
    using moe::machine::Precision;
    CHECK(moe::published::recipe_precision("BF16") == Precision::bf16);
    for (const char* name : {"FP8", "FP8-delayed", "FP8-tensor(current)", "fp8-tensor"})
        CHECK(moe::published::recipe_precision(name) == Precision::fp8_tensor);
    for (const char* name : {"FP8-blockwise", "FP8-rowwise"})
        CHECK(moe::published::recipe_precision(name) == Precision::fp8_blockwise);
    CHECK(moe::published::recipe_precision("MXFP8") == Precision::mxfp8);
    CHECK(moe::published::recipe_precision("NVFP4") == Precision::nvfp4);
    CHECK_THROWS_AS(moe::published::recipe_precision(""), moe::Error);
}

TEST_CASE("systems by their published names") {
    for (const auto& [system, profile] :
         std::vector<std::pair<std::string, std::string>>{{"H100", "h100"},
                                                          {"H200", "h200"},
                                                          {"H800", "h800"},
                                                          {"A100", "a100-sxm"},
                                                          {"H100(HBM2e,500W)", "h100-hbm2e"}}) {
        moe::published::Run run = llama();
        run.system = system;
        CAPTURE(run.system);
        REQUIRE(skipped(run) == "");
        CHECK(planned(run).plan.hardware->name == profile);
    }
}

TEST_CASE("stacks by source and release: the same, else the newest before, else the oldest") {
    const std::vector<std::pair<std::string, moe::stack::Publication>> published{
        {"old", {"Docs", {"25.09", "25.11"}}},
        {"new", {"Docs", {"26.04", "26.04.01"}}},
        {"special", {"Docs/Special", {}}},
    };
    CHECK(moe::published::stack_of(published, "Docs page 3", "25.11") == "old");
    CHECK(moe::published::stack_of(published, "Docs page 3", "26.04.01") == "new");
    CHECK(moe::published::stack_of(published, "Docs page 3", "26.02") == "old");
    CHECK(moe::published::stack_of(published, "Docs page 3", "27.1") == "new");
    CHECK(moe::published::stack_of(published, "Docs page 3", "24.07") == "old");
    CHECK(moe::published::stack_of(published, "Docs/Special page", "26.04") == "special");
    CHECK(moe::published::stack_of(published, "somewhere else", "26.04") == "");
    CHECK(moe::published::compare_releases("v25.04.02", "v25.05.05") < 0);
    CHECK(moe::published::compare_releases("26.10", "26.9") > 0);
    CHECK(moe::published::compare_releases("26.04", "26.04.01") < 0);
    CHECK(moe::published::compare_releases("v25.04", "25.4") == 0);
    moe::published::Run run = deepseek();
    run.source = "a blog";
    const moe::published::PlannedRun p = planned(run);
    REQUIRE(p.skipped == "");
    CHECK(p.plan.stack == p.plan.hardware->default_stack);
    CHECK(p.warnings.size() == 1);
}
