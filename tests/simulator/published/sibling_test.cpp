// Blank cells come from the recipe that is most like the row, and only where it agrees in what they depend on.
#include "planner/base/files.hpp"
#include "planner/plan/plan.hpp"
#include "simulator/published/run_plan.hpp"
#include "simulator/published/sibling.hpp"
#include "tests/simulator/published/published_run.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

using moe::published::Run;

namespace {

// DeepSeek-V3 on 256 GB200 with nothing but its mapping.
Run row(const std::string& release = "26.04") {
    Run run = moe::test::published_run({"Megatron-Bridge docs/performance-summary.md", release},
                                       {"DeepSeek-V3", "GB200", "MXFP8"}, {256, 4096, 4096, 1, 4});
    run.run_id = "row";
    run.ep = 64;
    run.mtp_layers = 1;
    run.tflops_std = 1000.0;
    return run;
}

Run recipe(const std::string& name) {
    Run run = row();
    run.run_id = name;
    run.source = "Megatron-Bridge v0.4.0 scripts/performance/configs";
    run.status = "recipe";
    run.vpp = 4, run.mbs = 1, run.etp = 1, run.ep_overlap = false;
    run.pipeline_layout = "Et*4|(tttt|)*14tmL";
    run.dispatcher = "hybridep", run.cuda_graph = "none", run.recompute_modules = "mlp", run.offload_modules = "none";
    return run;
}

moe::published::PlannedRun planned(const Run& run, std::vector<Run> recipes) {
    return moe::published::RunPlanner(moe::machine::load_coefficients(), std::move(recipes)).plan(run);
}

bool tells(const moe::published::PlannedRun& p, const std::string& words) {
    return std::any_of(p.warnings.begin(), p.warnings.end(),
                       [&words](const std::string& warning) { return warning.find(words) != std::string::npos; });
}

} // namespace

TEST_CASE("blank cells are those of a sibling, and the row says so") {
    const moe::published::PlannedRun p = planned(row(), {recipe("sister")});
    REQUIRE(p.skipped == "");
    CHECK(p.plan.vpp == 4);
    CHECK(p.plan.mbs == 1);
    CHECK_FALSE(p.open_mbs);
    CHECK_FALSE(p.open_vpp);
    CHECK_FALSE(p.open_recompute);
    CHECK(p.plan.layout == "Et*4|(tttt|)*14tmL");
    CHECK(p.plan.recompute == moe::plan::recompute::mlp);
    CHECK(tells(p, "blank cells are those of sister: vpp 4, etp 1, mbs 1, pipeline_layout"));
}

TEST_CASE("what a row states stays, and a cell comes only from who agrees in what it depends on") {
    Run stated = row();
    stated.vpp = 2, stated.mbs = 2;
    moe::published::PlannedRun p = planned(stated, {recipe("sister")});
    REQUIRE(p.skipped == "");
    CHECK(p.plan.vpp == 2);
    CHECK(p.plan.mbs == 2);
    CHECK(p.plan.layout == "");                             // the sister's is of vpp 4
    CHECK(p.open_recompute);                                // and its memory is another one
    CHECK(p.plan.cuda_graph == moe::plan::CudaGraph::none); // what a release does by itself is the same
    CHECK(tells(p, "blank cells are those of sister: etp 1, dispatcher hybridep"));

    Run other = recipe("other");
    other.system = "GB300";
    CHECK(planned(row(), {other}).open_mbs);
    other = recipe("other"), other.precision = "BF16";
    CHECK(planned(row(), {other}).open_mbs);
    other = recipe("other"), other.source = "NVIDIA NeMo";
    CHECK(planned(row(), {other}).open_mbs);
    other = recipe("other"), other.precision = "FP8-tensor(current)"; // eight bits too
    CHECK_FALSE(planned(row(), {other}).open_mbs);
    other = recipe("other"), other.release = "26.08"; // another stack gives the mapping, not its usual choices
    p = planned(row(), {other});
    CHECK(p.plan.vpp == 4);
    CHECK(p.open_recompute);
}

TEST_CASE("of several siblings the most equal one gives a cell") {
    Run far = recipe("far"), near = recipe("near");
    far.gbs = 2048, far.recompute_modules = "mla_up_proj";
    const moe::published::PlannedRun p = planned(row(), {far, near});
    CHECK(p.plan.recompute == moe::plan::recompute::mlp);
    near.recompute_modules = "";
    CHECK(planned(row(), {far, near}).plan.recompute == moe::plan::recompute::mla_up_proj);
}

TEST_CASE("a misprinted vpp counts as blank, in a row and in a sibling") {
    Run run = row();
    run.vpp = 1, run.other_settings = "vpp misprinted";
    CHECK(planned(run, {recipe("sister")}).plan.vpp == 4);
    CHECK(planned(row(), {run}).plan.vpp == 1); // gives nothing
    CHECK_FALSE(tells(planned(row(), {run}), "blank cells"));
}

TEST_CASE("a blank or misprinted ep is that of a sibling with the same ranks") {
    Run run = row();
    run.ep.reset();
    CHECK(planned(run, {recipe("sister")}).plan.ep == 64);
    CHECK(planned(run, {recipe("sister")}).plan.dispatcher == moe::plan::Dispatcher::hybridep);
    Run larger = recipe("larger");
    larger.gpus = 512;
    CHECK(planned(run, {larger}).plan.ep == 1);
    run.ep = 8, run.other_settings = "forced_balance;ep misprinted";
    CHECK(planned(run, {recipe("sister")}).plan.ep == 64);
    CHECK_FALSE(tells(planned(row(), {run}), "ep 8"));
}

TEST_CASE("cells that make no plan beside the row's are left out again") {
    Run odd = recipe("odd");
    odd.pipeline_layout = "Et*4|(tttt|)*13tmL"; // a stage too few
    const moe::published::PlannedRun p = planned(row(), {odd});
    CHECK(p.skipped == "");
    CHECK_FALSE(tells(p, "blank cells"));
}

TEST_CASE("a blank etp is tp where a source had no folding, 1 elsewhere") {
    Run run = moe::test::published_run({"arXiv 2504.14960 Table 1", "2504.14960"}, {"Mixtral-8x22B", "H100", "BF16"},
                                       {128, 256, 4096, 2, 8});
    run.ep = 4, run.mbs = 1, run.tflops_std = 400.0;
    const moe::published::PlannedRun unfolded = planned(run, {});
    REQUIRE(unfolded.skipped == "");
    CHECK(unfolded.plan.etp == 2);
    CHECK(tells(unfolded, "blank etp is tp = 2"));
    run.etp = 1;
    CHECK(planned(run, {}).plan.etp == 1);
    CHECK(planned(row(), {}).plan.etp == 1);
}

TEST_CASE("shipped recipes: read, of known models, and a published row with blank cells has its sisters'") {
    moe::published::RunPlanner planner(moe::machine::load_coefficients());
    int filled = 0, blank = 0;
    for (const Run& run : moe::published::load_runs("megatron-bridge")) {
        if (run.status != "current" || !run.cuda_graph.empty()) continue;
        const moe::published::PlannedRun p = planner.plan(run);
        if (!p.skipped.empty()) continue;
        ++blank;
        filled += tells(p, "blank cells are those of");
    }
    CHECK(blank >= 20);
    CHECK(filled >= blank / 2);
    const std::string folder = moe::profiles_folder() + "/runs/recipes";
    const std::vector<Run> recipes = moe::published::load_runs(folder);
    CHECK(recipes.size() > 700);
    for (const Run& run : recipes) {
        CAPTURE(run.run_id);
        CHECK(run.status == "recipe");
        CHECK(run.tp.has_value());
        CHECK(run.mbs.has_value());
    }
}
