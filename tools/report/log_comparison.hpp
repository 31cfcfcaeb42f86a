// A training log beside the prediction of the plan that it ran.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/search/pricing.hpp"
#include "tools/measured/log_reader.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

struct LogOutlier {
    std::int64_t iteration = 0;
    double seconds = 0.0;
};

// What the seconds of a step follow from.
enum class LogTime : unsigned char { seconds, tokens, samples, elapsed };
const char* to_string(LogTime time);

struct LogComparison {
    std::string engine, format;
    double predicted_seconds = 0.0, measured_seconds = 0.0; // of a step; measured: median of the iterations used
    double predicted_tflops = 0.0, measured_tflops = 0.0;   // model TFLOPS/GPU, both by the plan's own FLOPs
    std::optional<double> logged_tflops;                    // as the engine counts them, median
    double predicted_memory_gib = 0.0;
    std::optional<double> allocated_gib, reserved_gib; // peaks that the log tells
    std::size_t iterations = 0;                        // lines that the median is of
    std::size_t logged = 0;                            // lines of the run
    std::size_t warm_up = 0;                           // of them left out at the front
    std::size_t other_batch = 0;      // of them left out since their batch or sequence is not the plan's
    std::size_t skipped = 0;          // of them left out since the optimizer left out steps
    std::vector<LogOutlier> outliers; // of them left out behind the warm-up
    std::size_t runs = 1;             // in the log
    bool cut = false;                 // see TrainingLog
    LogTime time = LogTime::seconds;  // by tokens and samples with the plan's batch
    double low = 0.0, high = 0.0;     // seconds: 10 % and 90 % quantiles of the iterations used
    std::optional<double> first_loss, last_loss;
    std::vector<std::string> warnings; // where the job is another than the plan's, or says too little: one line each

    // Allocated where the log tells it, else reserved.
    std::optional<double> measured_memory_gib() const { return allocated_gib ? allocated_gib : reserved_gib; }
    // predicted / measured - 1 of the TFLOPS
    double error() const { return predicted_tflops / measured_tflops - 1.0; }
};

// Throws Error (bad_input) naming `place` where the log is of another batch than the plan, or tells no time.
LogComparison compare_log(const plan::Plan& plan, const search::Estimate& predicted, const TrainingLog& log,
                          const std::string& place);

} // namespace moe::tools
