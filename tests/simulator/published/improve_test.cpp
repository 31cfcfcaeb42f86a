// Published plans against search over the same GPUs: never slower, sound, and every change named.
#include "planner/base/files.hpp"
#include "simulator/published/improve.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

TEST_CASE("search over the GPUs of published runs is at least as fast, and says what it changes") {
    std::vector<published::Run> runs = published::load_runs(profiles_folder() + "/runs");
    const std::vector<std::string> sample = thinned<std::string>(
        {"AM-AutoModel-Q3-30B-H100-BF16-8g", "MB-25.11-DSV3-GB300-BF16-256g", "AM-AutoModel-OSS120-H100-BF16-64g"});
    std::erase_if(runs, [&](const published::Run& run) {
        return std::find(sample.begin(), sample.end(), run.run_id) == sample.end();
    });
    REQUIRE(runs.size() == sample.size());
    const machine::Coefficients coefficients = machine::load_coefficients();
    const std::vector<published::Prediction> predictions = published::predict_runs(runs, coefficients, {});
    const std::vector<published::Improvement> improvements = published::improve(predictions, coefficients, {});
    REQUIRE(improvements.size() == sample.size());
    for (std::size_t i = 0; i < improvements.size(); ++i) {
        const published::Improvement& found = improvements[i];
        CAPTURE(found.run_id);
        CHECK(found.estimate.step_seconds <= predictions[i].estimate.step_seconds);
        CHECK(found.estimate.tflops_per_gpu >= found.published_tflops);
        CHECK(found.candidates > 1000);
        CHECK(!plan::check_plan(found.best));
        CHECK(found.best.gpus == predictions[i].plan.gpus);
        CHECK(found.best.gbs == predictions[i].plan.gbs);
        CHECK(found.best.precision == predictions[i].plan.precision);
        CHECK(found.changes.empty() == (found.estimate.step_seconds == predictions[i].estimate.step_seconds));
        for (const plan::FieldChange& change : found.changes) CHECK(change.from != change.to);
    }
}
