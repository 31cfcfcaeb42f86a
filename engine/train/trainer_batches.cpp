// Steps of the plan's batch, and of the smaller ones that lead up to it.
#include "engine/run/executable.hpp"
#include "engine/train/trainer.hpp"
#include "planner/lower/lower.hpp"

namespace moe::train {

// Of a smaller batch by its own Programs, whose weights, inputs and scalars lie where the plan's do.
void Trainer::run_step(bool timed) {
    if (batch_ < plan_.gbs) {
        for (Rank& r : ranks_) r.smaller.at(batch_).executor->begin();
        smaller_batch_ = batch_;
        run_ranks([&](Rank& r, int) {
            const Beside& own = r.smaller.at(batch_);
            own.recorder->begin_step(0, zero_);
            begin_rank(r);
            own.executor->step(*own.recorder, false);
        });
        smaller_batch_ = 0;
        return;
    }
    for (Rank& r : ranks_) r.executor->begin();
    run_ranks([&](Rank& r, int) {
        r.recorder->begin_step(static_cast<std::size_t>(done_), zero_);
        begin_rank(r);
        r.executor->step(*r.recorder, timed);
    });
}

// Lowers the steps of a batch that is new, one for each pipeline rank.
void Trainer::prepare_batch() {
    if (batch_ == plan_.gbs) return;
    first_full_ = done_ + 1;
    if (smaller_.count(batch_) > 0) return;
    std::vector<program::Program>& programs = smaller_[batch_];
    const plan::Plan plan = with_batch(plan_, batch_);
    for (int stage = 0; stage < plan.pp; ++stage) programs.push_back(lower::lower(plan, stage));
    run::check_executable(plan, programs, *backend_);
    keep_routing(programs, true);
    for (Rank& r : ranks_) r.smaller[batch_];
    run_ranks(
        [&](Rank& r, int) { build_beside(r, programs[static_cast<std::size_t>(r.stage)], r.smaller.at(batch_)); });
}

} // namespace moe::train
