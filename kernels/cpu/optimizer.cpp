// AdamW on a shard, and the flat vector kernels around it: zero, norm, casts and the sums of a collective.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void zero(Dst x, std::int64_t n, void*) {
    if (n > 0) std::memset(x.data, 0, static_cast<std::size_t>(n) * size_of(x.type));
}

// Chunks are summed in double, so that the norm of a large bucket does not depend on how it is cut into shards.
void sum_squares(Src x, float* s, std::int64_t n, void*) {
    float* wide = scratch(Slot::a, chunk);
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        sum += static_cast<double>(In(read(x, i, m, wide), m).square().sum());
    }
    *s += static_cast<float>(sum);
}

struct Hyper {
    float lr, beta1, beta2, eps, decay, clip, correction1, correction2;
};

void adamw_chunk(const Hyper& h, float factor, float decay, const float* g, std::int64_t n, float* master, float* m,
                 float* v) {
    const In grad(g, n);
    Out p(master, n), first(m, n), second(v, n);
    first = h.beta1 * first + (1.0f - h.beta1) * factor * grad;
    second = h.beta2 * second + (1.0f - h.beta2) * (factor * grad).square();
    p -= h.lr * (decay * p + first / h.correction1 / ((second / h.correction2).sqrt() + h.eps));
}

void adamw(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
           float* master, Dst m, Dst v, Dst w, void*) {
    if (overflow != nullptr && *overflow > 0.0f) return;
    if (hyper[8] > 0.0f && !(*squares <= hyper[8])) return;
    const Hyper h{hyper[0] * s.rate, hyper[1], hyper[2], hyper[3], s.decay < 0.0f ? hyper[4] : s.decay,
                  hyper[5],          hyper[6], hyper[7]};
    const float norm = std::sqrt(*squares);
    const float factor = h.clip > 0.0f && norm > h.clip ? h.clip / (norm + 1e-6f) : 1.0f;
    float* wide_m = scratch(Slot::a, chunk);
    float* wide_v = scratch(Slot::b, chunk);
    // Chunks end where the decayed part ends, so that each has one decay.
    const std::int64_t boundary =
        s.decay < 0.0f ? std::clamp<std::int64_t>(s.decayed - s.offset, 0, s.elements) : s.elements;
    for (std::int64_t i = 0; i < s.elements;) {
        const std::int64_t end = i < boundary ? boundary : s.elements;
        const std::int64_t n = std::min(chunk, end - i);
        float* first = target(m, i, wide_m);
        float* second = target(v, i, wide_v);
        if (m.type == Type::bf16) load(m, i, n, first);
        if (v.type == Type::bf16) load(v, i, n, second);
        adamw_chunk(h, factor, i < boundary ? h.decay : 0.0f, g + i, n, master + i, first, second);
        flush(m, i, n, first);
        flush(v, i, n, second);
        if (w.data != nullptr) store(w, i, n, master + i);
        i += n;
    }
}

void cast(Src x, Dst y, std::int64_t n, void*) { move(x, 0, y, 0, n); }

template <class Combine>
void reduce(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, Combine combine) {
    float* sum = scratch(Slot::a, chunk);
    float* wide = scratch(Slot::b, chunk);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        load(Src{srcs[0], type}, i, m, sum);
        for (int s = 1; s < sources; ++s) combine(Out(sum, m), In(read(Src{srcs[s], type}, i, m, wide), m));
        store(dst, i, m, sum);
    }
}

void reduce_sum(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void*) {
    reduce(dst, srcs, sources, n, type, [](Out sum, In x) { sum += x; });
}
void reduce_max(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void*) {
    reduce(dst, srcs, sources, n, type, [](Out best, In x) { best = best.max(x); });
}

} // namespace

void add_optimizer(Kernels& table) {
    table.zero = zero;
    table.sum_squares = sum_squares;
    table.adamw = adamw;
    table.cast = cast;
    table.reduce_sum = reduce_sum;
    table.reduce_max = reduce_max;
}

} // namespace moe::cpu
