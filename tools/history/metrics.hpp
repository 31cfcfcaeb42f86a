// The history of a training: a line of metrics.jsonl and an event of TensorBoard for every step.
#pragma once

#include "tools/history/tensorboard.hpp"
#include "tools/report/documents.hpp"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace moe::tools {

// Of a step that has just ended.
struct StepContext {
    double wall_seconds = 0.0; // since 1970
    double memory_gib = 0.0;   // of the fullest rank
};

// One line, without its end: the step as run.json has it, memory_gib and time.
std::string metrics_line(const StepRecord& step, const StepContext& context);

class Metrics {
public:
    // `done`: steps that the run has behind it as it starts. Lines of later steps, which it takes again, move to
    // metrics.replaced.jsonl; half a line of a killed run goes. Throws Error: bad_input where the folder has lines and
    // the run does not resume, or a line that is no step; failure where it cannot be written.
    Metrics(const std::string& folder, std::int64_t done, bool resumes);
    void add(const StepRecord& step, const StepContext& context);

private:
    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    std::string path_;
    std::unique_ptr<std::FILE, Close> lines_;
    std::unique_ptr<EventFile> events_;
};

} // namespace moe::tools
