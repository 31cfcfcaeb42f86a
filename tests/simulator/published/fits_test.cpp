// Every published plan must fit the GPU that it ran on; the rows that do not are named with their reasons.
#include "planner/base/files.hpp"
#include "simulator/published/runs.hpp"
#include "simulator/published/validate.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

using namespace moe;

namespace {

bool holds(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

// Why a row may be predicted not to fit; empty when it may not.
std::string reason(const published::Run& run) {
    // cpu_offloading_num_layers: whole activations of half of the layers wait in host memory, which no plan says.
    if (holds(run.offload_modules, "layer-activations")) return "offload of whole layers";
    // MBS as printed is twice that of the release's own recipe (scripts/performance/configs of Megatron-Bridge: 1),
    // with which it fits.
    if (run.run_id == "MB-25.09-L3-70B-GB200-MXFP8-64g") return "printed MBS";
    // Printed without FSDP and without a pipeline or its chunks; weights, gradients and activations of 70 billion
    // parameters at MBS 2 fill 1.3 to 1.8 GPUs. Neighbouring releases have PP 4, VPP 5 and MBS 1.
    for (const char* id : {"MB-26.02.01-L3-70B-GB300-NVFP4-64g", "MB-26.02.01-L3-70B-GB300-MXFP8-64g"})
        if (run.run_id == id) return "printed mapping";
    // 31.6 billion parameters on eight GPUs of 80 GB: Qwen3-30B-A3B's row with the same settings and 3 % fewer fits to
    // the last 0.1 GiB.
    if (run.run_id == "AM-AutoModel-N3Nano-H100-BF16-8g") return "states of a stack that prints no precision of them";
    return {};
}

} // namespace

TEST_CASE("every published plan fits its GPU, but for rows with a known reason") {
    int predicted = 0, too_large = 0;
    for (const auto& file : std::filesystem::directory_iterator(profiles_folder() + "/runs")) {
        if (file.path().extension() != ".csv") continue;
        const std::vector<published::Run> runs = thinned(published::load_runs(file.path().string()));
        const std::vector<published::Prediction> predictions =
            published::predict_runs(runs, machine::load_coefficients(), {});
        for (std::size_t i = 0; i < runs.size(); ++i) {
            const published::Prediction& p = predictions[i];
            if (!p.skipped.empty()) continue;
            ++predicted;
            const bool fits = std::none_of(p.warnings.begin(), p.warnings.end(),
                                           [](const std::string& w) { return holds(w, "not to fit"); });
            if (!fits) ++too_large;
            CAPTURE(p.run_id);
            CHECK(fits == reason(runs[i]).empty());
        }
    }
    MESSAGE(too_large, " of ", predicted, " published plans are predicted not to fit");
    CHECK(predicted > static_cast<int>(draws(400)));
    CHECK(too_large <= 12);
}
