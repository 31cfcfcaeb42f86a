// A training run as its owner sees it: how long a plan takes for a number of tokens, how much of that trains, and what
// it costs.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/search/pricing.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace moe::goodput {

inline constexpr double trillion = 1e12;

// Storage that a GPU has to itself while all write, in bytes per second: 2 TB/s that 16,384 GPUs share. Source: The
// Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.1 (sustained throughput).
inline constexpr double usual_storage_bandwidth = 2e12 / 16384;
// Seconds from a failure until training goes on. Source: MegaScale, arXiv 2402.15627, section 6.3: failures are
// detected and diagnosed in less than ten minutes.
inline constexpr double usual_restart_seconds = 600.0;

// What is asked of a run, and what is assumed of the machine.
struct Terms {
    std::optional<double> price;          // dollars per GPU and hour
    std::optional<double> mtbf_hours;     // of one GPU; empty: failures are left out, and so are checkpoints
    std::optional<double> tokens;         // to train on; empty: figures are of a trillion
    std::optional<double> deadline_hours; // for those tokens
    double storage_bandwidth = usual_storage_bandwidth; // bytes/s of one GPU
    double restart_seconds = usual_restart_seconds;
    std::optional<double> interval_seconds; // of training between checkpoints; empty: Daly's for each plan

    bool given() const { return price || mtbf_hours || tokens || deadline_hours; }
    double budget() const { return tokens.value_or(trillion); } // tokens
};

struct Outlook {
    double goodput = 1.0; // share of the run's time that trains and is not lost
    double hours = 0.0;   // that the run takes for the tokens
    double gpu_hours = 0.0;
    std::optional<double> dollars, dollars_per_trillion; // of the tokens, and of a trillion; empty without a price

    // Only where failures count.
    double job_mtbf_hours = 0.0;
    double checkpoint_bytes = 0.0; // of the GPU that writes most
    double write_seconds = 0.0;
    std::int64_t interval_steps = 0; // from one checkpoint to the next; at least one
    double interval_seconds = 0.0;   // those steps
};

// "15T", "1.2B".
std::string tokens_text(double tokens);

// Of a plan whose step was priced. Hours are infinite where failures leave nothing.
Outlook outlook(const plan::Plan& plan, const search::Estimate& estimate, const Terms& terms);

} // namespace moe::goodput
