// What execute says and keeps of every step.
#pragma once

#include "engine/train/trainer.hpp"
#include "tools/print/console.hpp"
#include "tools/report/documents.hpp"

#include <cstdint>
#include <vector>

namespace moe::tools {

// Turns step results into records of `run`, whose predicted step is known, and log lines.
class StepLog {
public:
    StepLog(Console& console, const Plan& plan, std::int64_t steps, RunRecord& run);
    void add(const StepResult& step);

private:
    Console& console_;
    std::int64_t steps_;
    RunRecord& run_;
    double flops_per_token_;
    int gpus_;
    std::vector<double> seconds_;
};

} // namespace moe::tools
