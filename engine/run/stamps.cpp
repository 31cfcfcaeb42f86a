// A step's clock without its stamps: every interval between two stamps of stream 0 loses one stamp.
#include "engine/run/stamps.hpp"

#include "engine/device/device.hpp"
#include "kernels/kernels.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace moe::run {

namespace {

// The deviations of a stamp from the usual one, in seconds, and of a step from the median of its like, by its length:
// standard deviations on an H200, where steps of 20 to 60 ms of eight plans told 3.7 to 4.2 us at a usual one of 3.4,
// and steps at the limit of its power vary by 1 to 2 %.
constexpr double stamp_spread = 0.5e-6, step_spread = 1e-2;

} // namespace

double measured_event_overhead(device::Device& device, const Kernels& kernels) {
    constexpr std::size_t calls = 256, rounds = 5;
    device::Queue* queue = device.queue();
    if (queue == nullptr || !queue->replays()) return 0.0;
    char* memory = device.allocate(256);
    if (memory == nullptr) return 0.0; // The step will not fit either, and says so.
    queue->reserve(calls + 1, 0);
    double seconds[2];
    for (const bool stamped : {false, true}) {
        const auto enqueue = [&] {
            for (std::size_t i = 0; i < calls; ++i) {
                kernels.zero({memory, Type::f32}, 64, queue->stream());
                if (stamped) queue->stamp(i + 1);
            }
        };
        queue->prepare(stamped, enqueue);
        std::vector<double> took;
        for (std::size_t round = 0; round < rounds; ++round) {
            queue->play(stamped, enqueue);
            queue->wait();
            took.push_back(queue->played_seconds());
        }
        seconds[stamped] = *std::min_element(took.begin(), took.end());
    }
    queue->forget();
    device.release(memory);
    return std::max(0.0, seconds[1] - seconds[0]) / calls;
}

EventClock::EventClock(std::vector<double> ends, double plain, double usual) : ends_(std::move(ends)) {
    if (ends_.empty()) return;
    const auto count = static_cast<double>(ends_.size());
    without_ = ends_;
    if (plain <= 0.0) return;
    const double stamps = count * stamp_spread, step = plain * step_spread, longer = ends_.back() - plain;
    stamp_ = std::max(0.0, usual + (longer - count * usual) * stamps * stamp_spread / (stamps * stamps + step * step));
    double before = 0.0, sum = 0.0;
    for (std::size_t i = 0; i < ends_.size(); ++i) {
        const double seconds = ends_[i] - before;
        without_[i] = sum += std::max(seconds - stamp_, 0.1 * seconds);
        before = ends_[i];
    }
    for (double& time : without_) time *= plain / sum;
}

double EventClock::without(double time) const {
    const auto next = std::upper_bound(ends_.begin(), ends_.end(), time);
    const auto passed = static_cast<std::size_t>(next - ends_.begin());
    const double end = passed == 0 ? 0.0 : ends_[passed - 1], at = passed == 0 ? 0.0 : without_[passed - 1];
    if (next == ends_.end()) return at + (time - end);
    return at + std::min(time - end, without_[passed] - at);
}

double EventClock::removed_seconds() const { return ends_.empty() ? 0.0 : ends_.back() - without_.back(); }

} // namespace moe::run
