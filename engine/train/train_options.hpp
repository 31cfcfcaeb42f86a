// What a training is asked for beside its plan: steps, the optimizer's hyperparameters, what it records and watches.
#pragma once

#include "engine/ops/backend.hpp"
#include "engine/train/batch_ramp.hpp"
#include "engine/train/qk_clip.hpp"
#include "engine/train/weight_rules.hpp"
#include "planner/lower/lower.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace moe::comm {
class Transport;
}

namespace moe::train {

// How the learning rate falls behind the warm-up: not at all; by half a cosine or along a line to the last step; not
// until the last decay_steps, then along a line (warm-up, stable, decay); by the inverse square root of the step.
enum class LearningRate : std::uint8_t { constant, cosine, linear, wsd, inverse_sqrt };
inline constexpr const char* learning_rate_names[] = {"constant", "cosine", "linear", "wsd", "inverse-sqrt"};
// Throws Error (bad_input) for another name, which the message gives to --lr-schedule.
LearningRate learning_rate_named(const std::string& name);

struct TrainOptions {
    std::int64_t steps = 10;
    double lr = 1e-3;
    LearningRate schedule = LearningRate::constant;
    std::int64_t warmup = 0;      // steps of linear warm-up
    double final_fraction = 0.1;  // lowest learning rate behind the warm-up, over lr; the constant one stays above
    std::int64_t decay_steps = 0; // of wsd, 0 = a tenth of the steps
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double weight_decay = 0.1; // decoupled decay, of matrices only
    double clip = 1.0;         // largest norm of the global gradient, 0 = off
    QkClip qk_clip;            // scales attention heads whose logits have grown too large
    WeightRules rules;         // frozen weights, and groups with a learning rate of their own
    // Bad steps leave weights, moments and selection biases as they are, to the bit: those whose norm is not finite,
    // and with `spike` above 0 those whose norm is above spike times the median of the last steps taken (BadSteps).
    bool skip_bad = false;
    double spike = 0.0;
    BatchRamp ramp;   // how the batch of a step grows to the plan's
    double ema = 0.0; // decay of an average of the weights, 0 = none
    // Router replay: folders of what routers choose, a file for each step (router_replay.hpp), empty = none. Choices
    // that are replayed are those of the same tokens under any plan; routers give them weights by their own logits.
    std::string record_routing, replay_routing;
    std::uint64_t seed = 1;
    int permits = 0; // number of ranks that run at once, 0 = the machine's cores
    // Recorded steps from which timeline() takes the median one. On a GPU only the last three of `steps` are recorded,
    // of fewer than nine the last one, and those behind them.
    int kept_steps = 9;
    std::string backend = "cpu";
    const ops::Backend* table = nullptr; // stands in place of the back end of that name
    int device = 0; // device of this machine that a single rank uses; several take one each from the first
    comm::Transport* transport = nullptr; // connects the processes of the other ranks; null: all ranks live here
    // Called, on another thread, when a rank has been in one op for longer than hang_timeout seconds without waiting
    // for others; the run cannot be ended from inside, so it should end the process. None: nobody watches.
    std::function<void(const std::string& line)> on_hang;
    double hang_timeout = 20.0; // 0: nobody watches
    // No step is taken: ranks hold weights alone, and evaluate() or, with cached keys, decode() is called.
    std::optional<lower::ForwardOnly> forward_only;
    bool evaluates = false; // evaluate() is called: its Programs take room in the arena where a step leaves too little
};

// Throws Error (bad_input) for values outside their range, by the name of the command-line option.
void check_options(const TrainOptions& options);
// Learning rate of step `step` (from 0).
double learning_rate(const TrainOptions& options, std::int64_t step);

} // namespace moe::train
