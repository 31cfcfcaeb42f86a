// The lines that execute prints and keeps of every step.
#pragma once

#include "engine/train/trainer.hpp"
#include "tools/print/console.hpp"
#include "tools/report/collapse.hpp"
#include "tools/report/documents.hpp"

#include <cstdint>
#include <vector>

namespace moe::tools {

struct LogSteps {
    std::int64_t steps = 0;    // of the run
    std::int64_t interval = 1; // steps between lines; the first and the last step have one too
};

// Turns step results into records of `run`, whose predicted step is known, and log lines.
class StepLog {
public:
    StepLog(Console& console, const plan::Plan& plan, LogSteps steps, RunRecord& run);
    void add(const train::StepResult& step);
    // The validation loss behind the step that was added last, and how long it took.
    void add(const train::Evaluation& evaluation, double seconds);

private:
    RouterRecord router_record(const train::RouterStep& router, std::int64_t tokens) const;

    Console& console_;
    LogSteps steps_;
    RunRecord& run_;
    double flops_per_token_;
    const plan::Plan& plan_;
    int gpus_;
    CollapseWatch routers_;
    std::vector<double> seconds_;
};

} // namespace moe::tools
