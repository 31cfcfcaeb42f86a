// What a resumed run must have in common with the run whose checkpoint it goes on from.
#pragma once

#include "engine/data/position.hpp"
#include "engine/weights/checkpoint.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::train {

struct ResumedRun {
    std::string config; // config.json of the plan's model
    std::uint64_t seed = 0;
    data::DataPosition data;                              // at its first sample
    std::vector<std::string> freeze = {}, lr_groups = {}; // as RunState's
    double ema = 0.0;                                     // likewise
    bool muon = false;                                    // likewise
    std::string lora = {};                                // likewise
    bool delayed = false;                                 // the plan's FP8 scales are of a history
};

// Compares the model's fields, the datasets, their blend, their order and the seed. Throws Error (bad_input) naming the
// first field that differs, both values, and --allow-change, unless `allowed` names it. Returns what the run should
// say: changes that are allowed, and those that need no leave (batch, length of samples). Fields of a config that say
// nothing about what is computed (dtype of files, names, token ids) are not compared; one that is stated with the value
// that its absence means is no change.
std::vector<std::string> check_resume(const std::string& path, const weights::RunState& stored, const ResumedRun& now,
                                      const std::vector<std::string>& allowed);
// Whether blocks of a pass come in the order in which the checkpoint's run took them.
bool same_order(const weights::RunState& stored, const ResumedRun& now);

} // namespace moe::train
