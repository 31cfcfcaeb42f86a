// Evaluation between steps: forward passes in the step's arena, with nothing kept of them but a loss.
#include "engine/train/trainer_processes.hpp"

#include "engine/run/executable.hpp"
#include "kernels/bf16.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/overflow_retry.hpp"

#include <algorithm>

namespace moe::train {

// Where routed rows may overflow, with the worst case's buffers.
void Trainer::lower_evaluation() {
    const plan::Plan plan = plan::overflow_retry_plan(plan_).value_or(plan_);
    for (int stage = 0; stage < plan.pp; ++stage) forwards_.push_back(lower::lower_forward(plan, stage));
    run::check_executable(plan, forwards_, *backend_);
    keep_routing(forwards_, false);
}

void Trainer::run_forward() {
    zero_ = run::Recorder::Clock::now();
    if (!options_.forward_only) return run_beside(&Rank::forward);
    for (Rank& rank : ranks_) rank.executor->begin();
    run_ranks([&](Rank& r, int) {
        r.recorder->begin_step(0, zero_);
        begin_rank(r);
        r.executor->step(*r.recorder, false);
    });
}

// A loss has the scale of a full batch's, whatever labels there are.
Evaluation Trainer::evaluate(const SampleSource& source, std::int64_t samples) {
    if (forwards_.empty() && !options_.forward_only) fail("this trainer was made without evaluation");
    Evaluation result;
    double sum = 0.0;
    batch_ = plan_.gbs;
    const auto batch = static_cast<double>(plan_.gbs * plan_.seq);
    for (std::int64_t first = 0; first < samples; first += plan_.gbs) {
        take_samples(source, first, samples);
        std::fill(label_shares_.begin(), label_shares_.end(), 1.0f);
        for (std::int64_t s = 0; s < plan_.gbs; ++s)
            for (std::int64_t at = 0; at < plan_.seq; ++at)
                result.tokens +=
                    tokens_[static_cast<std::size_t>(s * (plan_.seq + 1) + at + 1)] >= 0 && labels(s, at, 1) ? 1 : 0;
        run_forward();
        sum += step_sums()[0] * batch;
    }
    if (result.tokens == 0) fail("there is nothing to evaluate");
    result.loss = sum / static_cast<double>(result.tokens);
    return result;
}

std::vector<float> Trainer::decode(std::int32_t token, std::int64_t position) {
    const std::int64_t keys = options_.forward_only ? options_.forward_only->cached_keys : 0;
    if (plan_.gpus != 1 || plan_.seq != 1 || plan_.gbs != 1 || position < 0 || position >= keys)
        fail("position {} of {} cannot be decoded by a plan of {} ranks and {} x {} tokens", position, keys, plan_.gpus,
             plan_.gbs, plan_.seq);
    Rank& rank = ranks_.front();
    const auto at = static_cast<std::int32_t>(position);
    rank.device->write(rank.arena->at(program_of(rank).io.positions), &at, sizeof at);
    tokens_ = {token, -1};
    run_forward();
    const program::TensorId id = program_of(rank).io.logits;
    const program::Tensor& tensor = program_of(rank).tensors[static_cast<std::size_t>(id)];
    std::vector<float> logits(static_cast<std::size_t>(tensor.elements()));
    if (tensor.dtype == program::Dtype::bf16) {
        std::vector<std::uint16_t> stored(logits.size());
        rank.device->read(stored.data(), rank.arena->at(id), stored.size() * sizeof stored[0]);
        std::transform(stored.begin(), stored.end(), logits.begin(), float_of_bf16);
    } else {
        rank.device->read(logits.data(), rank.arena->at(id), logits.size() * sizeof logits[0]);
    }
    logits.resize(static_cast<std::size_t>(plan_.model->vocab)); // The rest fills up the vocabulary.
    return logits;
}

} // namespace moe::train
