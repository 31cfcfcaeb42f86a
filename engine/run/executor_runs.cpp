// The parts of a step that are CUDA graphs of their own: recorded once, and queued among the ops around them.
#include "engine/run/executor.hpp"

#include <algorithm>
#include <map>
#include <tuple>

namespace moe::run {

// What a run records.
void Executor::enqueue_run(device::Queue& queue, const GraphRun& run, bool timed) {
    program::OpWalk walk = run.walk;
    int number = run.op;
    for (std::size_t w = run.begin; w < run.end; ++w) {
        for (; number < (*order_)[w].op; ++number) walk.next();
        call(walk);
        if (timed) queue.stamp(w + 1, 0);
    }
}

void Executor::play_run(device::Queue& queue, const GraphRun& run, bool timed) {
    for (const int other : (*order_)[run.begin].waits)
        queue.await(static_cast<std::size_t>((*order_)[static_cast<std::size_t>(other)].signal), 0);
    ++calls_;
    queue.play_part(timed ? run.stamped : run.plain);
    ++calls_;
    if (const int signal = (*order_)[run.end - 1].signal; signal >= 0)
        queue.signal(static_cast<std::size_t>(signal), 0);
}

void Executor::record_runs(device::Queue& queue) {
    std::map<std::size_t, device::QueuedStep> plain;
    for (const GraphRun& run : runs_) {
        queue.record_part(run.stamped, [this, &queue, &run] { enqueue_run(queue, run, true); });
        device::QueuedStep& part = plain[run.plain];
        if (part.records == 0)
            part = queue.record_part(run.plain, [this, &queue, &run] { enqueue_run(queue, run, false); });
        queued_parts_.records += part.records;
        queued_parts_.nodes += part.nodes;
        queued_parts_.fills += part.fills;
        queued_parts_.host_copies += part.host_copies;
    }
    runs_recorded_ = true;
}

device::QueuedStep Executor::queued_parts() const {
    device::QueuedStep step = queued_parts_;
    std::array<double, std::tuple_size_v<decltype(host_seconds_)>> seconds = host_seconds_;
    const std::size_t count = std::min(host_steps_, seconds.size()), middle = count / 2;
    std::nth_element(seconds.begin(), seconds.begin() + middle, seconds.begin() + count);
    step.host_seconds = seconds[middle];
    return step;
}

} // namespace moe::run
