// Samples of one shape, or of like work, become one call.
#include "engine/bench/measured_calls.hpp"

#include "planner/base/error.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/measured.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace moe::bench {

namespace {

constexpr double bin = 1.25; // largest work of one bin, over its smallest

auto order(const machine::MeasuredCall& call) { return std::tie(call.work, call.sides); }
bool sooner(const machine::MeasuredCall& a, const machine::MeasuredCall& b) { return order(a) < order(b); }

template <class Alike>
std::vector<machine::MeasuredCall> merged(const std::vector<machine::MeasuredCall>& samples, const Alike& alike) {
    std::vector<machine::MeasuredCall> calls;
    for (std::size_t first = 0, last = 0; first < samples.size(); first = last) {
        machine::MeasuredCall sum{0.0, 0.0, samples[first].sides};
        bool clocks = true;
        for (; last < samples.size() && alike(samples[first], samples[last]); ++last) {
            sum.work += samples[last].work;
            sum.seconds += samples[last].seconds;
            sum.clock_hz += samples[last].clock_hz;
            clocks = clocks && samples[last].clock_hz > 0.0;
        }
        const double count = static_cast<double>(last - first);
        calls.push_back(
            {sum.work / count, std::max(sum.seconds / count, 1e-9), sum.sides, clocks ? sum.clock_hz / count : 0.0});
    }
    return calls;
}

} // namespace

bool has_own_time(program::OpKind kind, unsigned offload) { return offload == 0 || program::copies_with_host(kind); }

void add_sample(CallSamples& samples, const program::Op& op, const program::Program& program, double seconds,
                double clock_hz) {
    program::CostPoint at = program::cost_point(op, program);
    if (at.work > 0.0) samples[at.key].push_back({at.work, seconds, std::move(at.sides), clock_hz});
}

std::vector<machine::MeasuredCall> calls_of(std::vector<machine::MeasuredCall> samples, bool by_shape) {
    std::sort(samples.begin(), samples.end(), sooner);
    if (by_shape) return merged(samples, [](const auto& a, const auto& b) { return order(a) == order(b); });
    for (machine::MeasuredCall& sample : samples) sample.sides.clear();
    return merged(samples, [](const auto& first, const auto& other) { return other.work <= bin * first.work; });
}

std::vector<machine::MeasuredCall> with_later(const std::string& key, std::vector<machine::MeasuredCall> calls,
                                              const std::vector<machine::MeasuredCall>& later) {
    for (const machine::MeasuredCall& call : later) {
        if (!calls.empty() && calls.front().sides.size() != call.sides.size())
            refuse(
                "calls of {} have {} sides in the profile and {} in the run: calibrate with this version of moe-plan",
                key, calls.front().sides.size(), call.sides.size());
        std::erase_if(calls, [&call](const machine::MeasuredCall& known) {
            if (!call.sides.empty()) return order(known) == order(call);
            return known.work <= bin * call.work && call.work <= bin * known.work;
        });
    }
    calls.insert(calls.end(), later.begin(), later.end());
    std::sort(calls.begin(), calls.end(), sooner);
    return calls;
}

} // namespace moe::bench
