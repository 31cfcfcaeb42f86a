// The training loop over a trainer's steps, with its options and learning-rate schedule.
#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <optional>

namespace moe::train {

namespace {

void require(bool sound, const char* option, double value, const char* range) {
    if (!sound || !std::isfinite(value)) refuse("{} {}: must be {}", option, value, range);
}

} // namespace

void check_options(const TrainOptions& o) {
    require(o.steps >= 1, "--steps", static_cast<double>(o.steps), "at least 1");
    require(o.lr >= 0.0, "--lr", o.lr, "0 or more");
    require(o.warmup >= 0, "--warmup", static_cast<double>(o.warmup), "0 or more");
    require(o.final_fraction >= 0.0 && o.final_fraction <= 1.0, "final learning rate fraction", o.final_fraction,
            "between 0 and 1");
    require(o.decay_steps >= 0, "--lr-decay-steps", static_cast<double>(o.decay_steps), "0 or more");
    require(o.beta1 >= 0.0 && o.beta1 < 1.0, "--betas", o.beta1, "at least 0 and below 1");
    require(o.beta2 >= 0.0 && o.beta2 < 1.0, "--betas", o.beta2, "at least 0 and below 1");
    require(o.eps > 0.0, "--eps", o.eps, "positive");
    require(o.weight_decay >= 0.0, "--weight-decay", o.weight_decay, "0 or more");
    require(o.ema >= 0.0 && o.ema < 1.0, "--ema", o.ema, "at least 0 (none) and below 1");
    require(o.hang_timeout >= 0.0, "--hang-timeout", o.hang_timeout, "0 (never) or more");
    require(o.spike >= 0.0, "--spike-norm", o.spike, "0 (off) or more");
    require(o.clip >= 0.0, "--grad-clip", o.clip, "0 (off) or more");
    check_range(o.qk_clip);
}

double learning_rate(const TrainOptions& options, std::int64_t step) {
    if (step < options.warmup) return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup);
    // Part of the way from the first of `steps` last steps to the last one, 0 before them.
    const auto progress = [&](std::int64_t steps) {
        const double span = static_cast<double>(std::max<std::int64_t>(1, steps - 1));
        return std::clamp(static_cast<double>(step - (options.steps - steps)) / span, 0.0, 1.0);
    };
    const std::int64_t behind = options.steps - options.warmup; // steps behind the warm-up
    double share = 1.0;                                         // of the way between the lowest rate and the peak
    switch (options.schedule) {
    case LearningRate::constant:
        return options.lr;
    case LearningRate::cosine:
        share = 0.5 * (1.0 + std::cos(std::numbers::pi * progress(behind)));
        break;
    case LearningRate::linear:
        share = 1.0 - progress(behind);
        break;
    case LearningRate::wsd: {
        const std::int64_t decay = options.decay_steps > 0 ? options.decay_steps : (options.steps + 9) / 10;
        share = 1.0 - progress(std::min(decay, behind));
        break;
    }
    case LearningRate::inverse_sqrt:
        return options.lr * std::max(options.final_fraction,
                                     std::sqrt(static_cast<double>(std::max<std::int64_t>(1, options.warmup)) /
                                               static_cast<double>(step + 1)));
    }
    return options.lr * (options.final_fraction + (1.0 - options.final_fraction) * share);
}

LearningRate learning_rate_named(const std::string& name) {
    const auto* const found = std::find(std::begin(learning_rate_names), std::end(learning_rate_names), name);
    if (found == std::end(learning_rate_names))
        refuse("--lr-schedule {}: must be one of {}", name, fmt::join(learning_rate_names, ", "));
    return static_cast<LearningRate>(found - std::begin(learning_rate_names));
}

namespace {

// Going back to checkpoints: the last one, and how often the run has gone back to it.
class Returns {
public:
    explicit Returns(const Saving& saving) : saving_(saving) {}

    void go_back(Trainer& trainer, const StepResult& bad) {
        constexpr int most = 3;
        saving_.writer.finish();
        trainer.any(false); // Every process has written its part, and the first one the whole.
        std::vector<std::string> skipped;
        const std::unique_ptr<weights::StoredCheckpoint> found =
            weights::newest_checkpoint(saving_.writer.folder(), skipped);
        if (!found)
            fail("step {}: {} bad steps in a row, and no checkpoint to go back to: lower --lr (it is {})", bad.step,
                 saving_.back_after, bad.lr);
        const std::int64_t step = found->state().step;
        times_ = step == step_ ? times_ + 1 : 1;
        step_ = step;
        if (times_ > most)
            fail("step {}: {} bad steps in a row, {} times from step {} on: lower --lr (it is {})", bad.step,
                 saving_.back_after, most, step, bad.lr);
        trainer.go_back(*found);
        if (saving_.say)
            saving_.say(
                fmt::format("step {}: {} bad steps in a row: going back to step {}, and on with the data behind",
                            bad.step, saving_.back_after, step));
    }

private:
    const Saving& saving_;
    std::int64_t step_ = -1;
    int times_ = 0;
};

} // namespace

std::vector<StepResult> train(Trainer& trainer, const TrainOptions& options, const SampleSource& source,
                              const std::function<void(const StepResult&)>& on_step, const Saving* saving) {
    constexpr std::int64_t most_bad = 100;
    std::vector<StepResult> results;
    std::optional<Returns> returns;
    if (saving != nullptr && saving->back_after > 0) returns.emplace(*saving);
    std::int64_t bad = 0; // steps in a row
    while (trainer.steps_done() < options.steps) {
        results.push_back(trainer.step(source));
        const StepResult& result = results.back();
        if (on_step) on_step(result);
        bad = result.skipped ? bad + 1 : 0;
        if (!options.skip_bad && (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)))
            fail("step {}: loss {} and gradient norm {} are not finite; lower --lr (it is {}) or raise --warmup",
                 result.step, result.loss, result.grad_norm, result.lr);
        if (bad >= most_bad)
            fail("step {}: {} bad steps in a row, the last with gradient norm {}; lower --lr (it is {})", result.step,
                 bad, result.grad_norm, result.lr);
        if (saving == nullptr) continue;
        const bool stop = trainer.any(saving->stop && saving->stop());
        if (returns && bad >= saving->back_after && !stop) {
            returns->go_back(trainer, result);
            bad = 0;
            continue;
        }
        // Between bad steps nothing changes that would be worth a checkpoint to go back to.
        const bool due = saving->interval > 0 && result.step % saving->interval == 0 && !(returns && bad > 0);
        if (stop || due || result.step == options.steps) saving->writer.save(trainer);
        if (stop) break;
    }
    if (saving != nullptr) saving->writer.finish();
    return results;
}

} // namespace moe::train
