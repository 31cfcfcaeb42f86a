// What Muon does element by element: its momentum, the matrix of unit norm, and the step along what was orthogonalized.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

// True in steps that change nothing; see Kernels::adamw.
bool skipped(const float* squares, const float* hyper, const float* overflow) {
    if (overflow != nullptr && *overflow > 0.0f) return true;
    return hyper[8] > 0.0f && !(*squares <= hyper[8]);
}

void momentum(double kept, float* g, const float* squares, const float* hyper, const float* overflow, Dst m,
              std::int64_t n, void*) {
    if (skipped(squares, hyper, overflow)) return;
    const float norm = std::sqrt(*squares), clip = hyper[5], mu = static_cast<float>(kept);
    const float factor = clip > 0.0f && norm > clip ? clip / (norm + 1e-6f) : 1.0f;
    float* wide = scratch(Slot::a, chunk);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t count = std::min(chunk, n - i);
        float* at = target(m, i, wide);
        if (m.type == Type::bf16) load(m, i, count, at);
        Out first(at, count), gradient(g + i, count);
        first = mu * first + factor * gradient;
        gradient = factor * gradient + mu * first;
        flush(m, i, count, at);
    }
}

void unit(Src x, const float* squares, const float* hyper, Dst y, std::int64_t n, void*) {
    const float factor = 1.0f / std::max(std::sqrt(*squares), hyper[3]);
    float *from = scratch(Slot::a, chunk), *to = scratch(Slot::b, chunk);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t count = std::min(chunk, n - i);
        float* at = target(y, i, to);
        Out(at, count) = factor * In(read(x, i, count, from), count);
        flush(y, i, count, at);
    }
}

void orthogonal_step(const AdamShape& s, double factor, Src o, const float* squares, const float* hyper,
                     const float* overflow, float* master, Dst w, void*) {
    if (skipped(squares, hyper, overflow)) return;
    const float rate = hyper[0] * s.rate, along = rate * static_cast<float>(factor),
                decay = rate * (s.decay < 0.0f ? hyper[4] : s.decay);
    float* wide = scratch(Slot::a, chunk);
    for (std::int64_t i = 0; i < s.elements; i += chunk) {
        const std::int64_t count = std::min(chunk, s.elements - i);
        Out p(master + i, count);
        p -= along * In(read(o, i, count, wide), count) + decay * p;
        if (w.data != nullptr) store(w, i, count, master + i);
    }
}

} // namespace

void add_muon(Kernels& table) {
    table.momentum = momentum;
    table.unit = unit;
    table.orthogonal_step = orthogonal_step;
}

} // namespace moe::cpu
