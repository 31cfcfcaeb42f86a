// Rows of a measured timeline: identity of each op from the Program, times from the run.
#include "engine/run/recorder.hpp"

#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::run {

Recorder::Recorder(const program::Program& program, int rank, int kept) {
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        const program::Op& op = walk.op();
        program::TimelineRow row;
        row.rank = rank;
        row.slot = static_cast<std::int32_t>(walk.slot_number());
        row.op = static_cast<std::int32_t>(walk.index());
        row.layer = op.layer;
        row.kind = op.kind;
        row.stream = op.stream;
        row.module = op.module;
        row.phase = op.phase;
        row.slot_kind = walk.ops().kind;
        row.chunk = static_cast<std::int16_t>(walk.ops().chunk);
        row.micro_batch = walk.slot().micro_batch;
        rows_.push_back(row);
    }
    steps_.assign(static_cast<std::size_t>(std::max(1, kept)), std::vector<Times>(rows_.size()));
    current_ = steps_.front().data();
}

void Recorder::begin_step(std::size_t step, Clock::time_point zero) {
    current_ = steps_[step % steps_.size()].data();
    next_ = 0;
    zero_ = zero;
}

std::vector<program::TimelineRow> Recorder::rows(std::size_t step) const {
    std::vector<program::TimelineRow> rows = rows_;
    const std::vector<Times>& times = steps_[step % steps_.size()];
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i].start = times[i].start;
        rows[i].end = times[i].end;
        rows[i].busy = times[i].busy;
    }
    return rows;
}

} // namespace moe::run
