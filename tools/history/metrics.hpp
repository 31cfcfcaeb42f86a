// The history of a training: a line of metrics.jsonl and an event of TensorBoard for every step.
#pragma once

#include "engine/train/trainer.hpp"
#include "tools/history/tensorboard.hpp"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace moe::tools {

// What a line holds beside the step's own figures.
struct StepContext {
    double wall_seconds = 0.0; // since 1970
    double tflops_per_gpu = 0.0;
    double memory_gib = 0.0; // of the fullest rank
};

// One line, without its end: step, loss, mtp_loss (with MTP), grad_norm, lr, seconds, tokens, tflops_per_gpu,
// memory_gib, overflow, time, and of every router layer, max_over_mean, entropy and losses.
std::string metrics_line(const train::StepResult& step, const StepContext& context);

// Entropy of the experts' loads over that of even loads: 1 = even, 0 = one expert has all. Even where nothing is sent.
double load_entropy(const train::RouterStep& router);

class Metrics {
public:
    // `done`: steps that the run has behind it as it starts. Lines of later steps, which it takes again, move to
    // metrics.replaced.jsonl; half a line of a killed run goes. Throws Error: bad_input where the folder has lines and
    // the run does not resume, or a line that is no step; failure where it cannot be written.
    Metrics(const std::string& folder, std::int64_t done, bool resumes);
    void add(const train::StepResult& step, const StepContext& context);

private:
    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    std::string path_;
    std::unique_ptr<std::FILE, Close> lines_;
    std::unique_ptr<EventFile> events_;
};

} // namespace moe::tools
