// Predictions of published runs: their arithmetic, their summary, and that every model has one on every machine.
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "simulator/published/validate.hpp"
#include "tests/simulator/published/published_run.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace {

moe::published::Prediction prediction(const std::string& model, double published, double predicted) {
    moe::published::Prediction p;
    p.model = p.family = model;
    p.published = published;
    p.predicted = predicted;
    p.error = predicted / published - 1.0;
    return p;
}

moe::published::Run mixtral() {
    moe::published::Run run = moe::test::published_run({"arXiv 2504.14960 Table 1/3", "2504.14960"},
                                                       {"Mixtral-8x22B", "H100", "BF16"}, {128, 256, 4096, 2, 8});
    run.run_id = "m";
    run.ep = 8;
    run.etp = 1;
    run.tflops_std = 487.7;
    run.gflop_per_token_std = 242.17;
    return run;
}

} // namespace

TEST_CASE("summary: mean and signed errors, share within a tenth, rank order") {
    std::vector<moe::published::Prediction> rows{prediction("a", 100.0, 109.0), prediction("a", 200.0, 182.0),
                                                 prediction("a", 102.0, 90.0), // 2 % from the first: no pair
                                                 prediction("b", 400.0, 500.0)};
    rows.emplace_back();
    rows.back().skipped = "reason";
    const moe::published::ValidationSummary s = moe::published::summarize(rows);
    CHECK(s.rows == 5);
    CHECK(s.predicted == 4);
    CHECK(s.skipped == 1);
    CHECK(s.mape == nearly((0.09 + 0.09 + 12.0 / 102.0 + 0.25) / 4.0));
    CHECK(s.bias == nearly((0.09 - 0.09 - 12.0 / 102.0 + 0.25) / 4.0));
    CHECK(s.within_10_percent == nearly(0.5));
    CHECK(s.pairs == 2);
    CHECK(s.kendall_tau == nearly(1.0));
    rows[1] = prediction("a", 200.0, 50.0); // now below both others
    CHECK(moe::published::summarize(rows).kendall_tau == nearly(-1.0));
    rows[1] = prediction("a", 200.0, 109.0); // a tie with the first, above the third
    CHECK(moe::published::summarize(rows).kendall_tau == nearly(0.5));
    const auto groups = moe::published::summarize_by(rows, &moe::published::Prediction::model);
    REQUIRE(groups.size() == 3); // the skipped row has a blank model
    CHECK(groups[1].first == "a");
    CHECK(groups[1].second.predicted == 3);
    CHECK(moe::published::summarize({}).mape == 0.0);
}

TEST_CASE("a predicted run counts FLOPs as the published figure does") {
    moe::published::Run twice = mixtral();
    *twice.gflop_per_token_std *= 2.0;
    const auto rows = moe::published::predict_runs({mixtral(), twice}, moe::machine::load_coefficients(), {});
    REQUIRE(rows[0].skipped == "");
    CHECK(rows[0].predicted == nearly(rows[0].estimate.tokens_per_second_per_gpu * 242.17e9 / 1e12));
    CHECK(rows[1].predicted == nearly(2.0 * rows[0].predicted));
    CHECK(rows[0].error == nearly(rows[0].predicted / 487.7 - 1.0));
    CHECK(rows[0].family == "MixtralForCausalLM");
    CHECK(rows[0].kind == "MoE");
}

TEST_CASE("a blank micro-batch size is the fastest that fits; a given one is kept") {
    const auto open = moe::published::predict_runs({mixtral()}, moe::machine::load_coefficients(), {}).at(0);
    REQUIRE(open.skipped == "");
    CHECK(open.estimate.fits);
    for (const int size : {1, 2, 4}) {
        moe::published::Run run = mixtral();
        run.mbs = size;
        run.recompute_modules = "none";
        const auto pinned = moe::published::predict_runs({run}, moe::machine::load_coefficients(), {}).at(0);
        REQUIRE(pinned.skipped == "");
        CHECK(pinned.plan.mbs == size);
        if (pinned.estimate.fits) CHECK(pinned.predicted <= open.predicted * (1.0 + 1e-9));
    }
}

TEST_CASE("a plan that is predicted not to fit is still timed, with a warning") {
    moe::published::Run run = mixtral();
    run.mbs = 4;
    run.seq_len = 65536;
    run.recompute_modules = "none";
    const auto p = moe::published::predict_runs({run}, moe::machine::load_coefficients(), {}).at(0);
    REQUIRE(p.skipped == "");
    CHECK_FALSE(p.estimate.fits);
    CHECK(p.predicted > 0.0);
    CHECK(std::any_of(p.warnings.begin(), p.warnings.end(), [](const std::string& warning) {
        return warning.find("predicted not to fit") != std::string::npos;
    }));
}

TEST_CASE("every model has a prediction on every machine") {
    std::vector<moe::published::Run> runs;
    for (const auto& entry : std::filesystem::directory_iterator(moe::profiles_folder() + "/models"))
        for (const char* system : {"H100", "H100(HBM2e,500W)", "H200", "H800", "B200", "B300", "GB200", "GB300"}) {
            const std::string model = entry.path().stem().string();
            moe::published::Run run = mixtral();
            run.source = "Megatron-Bridge docs/performance-summary.md";
            run.release = "26.04";
            run.model = model;
            run.run_id = model + " on " + system;
            run.system = system;
            run.tp = run.pp = 1;
            run.ep.reset();
            run.mbs = 1;
            run.gflop_per_token_std.reset();
            runs.push_back(run);
        }
    REQUIRE(runs.size() > 300);
    for (const moe::published::Prediction& p :
         moe::published::predict_runs(runs, moe::machine::load_coefficients(), {})) {
        CAPTURE(p.run_id);
        CHECK(p.skipped == "");
        CHECK(std::isfinite(p.predicted));
        CHECK(p.predicted > 0.0);
        const double peak = p.skipped.empty()
                                ? p.plan.hardware->peak_flops[static_cast<std::size_t>(moe::machine::Precision::bf16)]
                                : 0.0;
        CHECK(p.predicted * 1e12 < peak);
    }
}

TEST_CASE("held-out runs: no fitted row is among them, those with complete recipes are met within 10 % in the mean") {
    const std::string folder = moe::profiles_folder() + "/runs";
    const std::vector<moe::published::Run> runs = moe::published::load_runs(folder + "/held-out");
    CHECK(runs.size() == 241);
    std::set<std::string> fitted;
    for (const moe::published::Run& run : moe::published::load_runs(folder)) fitted.insert(run.run_id);
    for (const moe::published::Run& run : runs) CHECK(fitted.count(run.run_id) == 0);
    double off = 0.0;
    int complete = 0, predicted = 0;
    const std::vector<moe::published::Run> cards = moe::published::load_runs(folder + "/held-out/model-cards.csv");
    for (const moe::published::Prediction& p :
         moe::published::predict_runs(cards, moe::machine::load_coefficients(), {})) {
        predicted += p.skipped.empty();
        if (!p.skipped.empty() || p.tier != "A") continue;
        off += std::abs(p.error);
        ++complete;
    }
    CHECK(predicted == 47);
    REQUIRE(complete == 22);
    CHECK(off / complete < 0.1);
    for (const char* file :
         {"/held-out/new-runs.csv", "/held-out/threads.csv", "/held-out/unseen.csv", "/held-out/second-unseen.csv"})
        for (const moe::published::Prediction& p : moe::published::predict_runs(
                 moe::published::load_runs(folder + file), moe::machine::load_coefficients(), {})) {
            CAPTURE(p.run_id);
            CHECK(p.skipped == "");
        }
    // What the network's figures do not tell is said; a network without a profile is refused by its name.
    moe::published::Run run = moe::published::load_runs(folder + "/held-out/second-unseen.csv")[1];
    REQUIRE(run.run_id == "AWS-Q3-30B-H100-64g-ep16-mbs4-ov0-uccl");
    const auto predict = [](const moe::published::Run& row) {
        return moe::published::predict_runs({row}, moe::machine::load_coefficients(), {}).front();
    };
    const auto named = predict(run).warnings;
    CHECK(std::any_of(named.begin(), named.end(), [](const std::string& warning) {
        return warning.find("over the network of h100-efa a proxy on the host") != std::string::npos;
    }));
    run.system = "H100-TCPX";
    CHECK(predict(run).skipped.find("h100-tcpx") != std::string::npos);
}

TEST_CASE("the shipped runs: most are predicted, and in the right order") {
    const auto rows = moe::published::predict_runs(thinned(moe::published::load_runs(moe::profiles_folder() + "/runs")),
                                                   moe::machine::load_coefficients(), {});
    const moe::published::ValidationSummary s = moe::published::summarize(rows);
    CHECK(s.rows == static_cast<int>(draws(587)));
    CHECK(s.predicted >= static_cast<int>(draws(375)));
    CHECK(s.kendall_tau > 0.75);
    for (const moe::published::Prediction& p : rows) {
        CAPTURE(p.run_id);
        if (!p.skipped.empty()) continue;
        CHECK(p.error > -0.9);
        CHECK(p.error < 9.0);
    }
}
