// AdamW of a shard: its parts, in FP8 or not, by one set of kernels or by the host's cores.
#include "engine/ops/adamw_step.hpp"

#include "engine/ops/operands.hpp"
#include "kernels/mxfp8.hpp"

#include <algorithm>
#include <thread>
#include <vector>

namespace moe::ops {

AdamwStep adamw_step_of(const OpContext& c) {
    const program::AdamAttr& a = std::get<program::AdamAttr>(c.op.attr);
    AdamwStep step{a.elements,   a.decayed,    c.shard_offset,   c.parts,   floats(c, 0), floats(c, 1),
                   floats(c, 2), floats(c, 6), floats_out(c, 0), dst(c, 1), dst(c, 2),    dst(c, 3)};
    step.in_fp8 = c.output(1).dtype == program::Dtype::mxfp8;
    return step;
}

void run_adamw(const Kernels& kernels, const AdamwStep& step, std::int64_t first, std::int64_t last, void* stream) {
    const ShardPart whole{0, step.elements};
    for (const ShardPart& part : step.parts.empty() ? std::span(&whole, 1) : step.parts) {
        if (part.frozen) continue;
        const std::int64_t begin = std::max(first, part.first), end = std::min(last, part.first + part.count);
        if (begin >= end) continue;
        const AdamShape shape{end - begin, step.offset + begin, step.decayed, part.rate, part.decay};
        const Dst weights = step.weights.data == nullptr ? step.weights : step.weights + begin;
        const float* gradients = step.gradients + begin;
        if (step.in_fp8) {
            auto* codes = static_cast<std::uint8_t*>(step.exp_avg.data);
            kernels.adamw_mxfp8(shape, gradients, step.norm, step.hyper, step.overflow, step.master + begin,
                                codes + begin, codes + step.elements + begin / mxfp8_block, step.exp_avg_sq + begin,
                                weights, stream);
        } else {
            kernels.adamw(shape, gradients, step.norm, step.hyper, step.overflow, step.master + begin,
                          step.exp_avg + begin, step.exp_avg_sq + begin, weights, stream);
        }
    }
}

void run_on_host(const AdamwStep& step, int threads) {
    AdamwStep states = step;
    states.weights = {};
    const auto part = [&](std::int64_t first, std::int64_t last) {
        run_adamw(cpu_kernels(), states, first, last, nullptr);
        cpu_kernels().cast({step.master + first, Type::f32}, step.weights + first, last - first, nullptr);
    };
    constexpr std::int64_t worthwhile = std::int64_t{1} << 16,
                           unit = 64; // elements that take longer than a thread's start
    const std::int64_t parts = std::clamp<std::int64_t>(step.elements / worthwhile, 1, threads);
    const auto at = [&](std::int64_t i) {
        return i == parts ? step.elements : step.elements * i / parts / unit * unit;
    };
    std::vector<std::jthread> helpers;
    for (std::int64_t i = 1; i < parts; ++i)
        helpers.emplace_back([&part, first = at(i), last = at(i + 1)] { part(first, last); });
    part(at(0), at(1));
}

} // namespace moe::ops
