// AdamW on a shard, and the flat vector kernels around it: zero, norm, casts and the sums of a collective.
#include "kernels/cpu/rows.hpp"
#include "kernels/mxfp8.hpp"

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

Hyper hyper_of(const AdamShape& s, const float* hyper) {
    return {hyper[0] * s.rate, hyper[1], hyper[2], hyper[3], s.decay < 0.0f ? hyper[4] : s.decay,
            hyper[5],          hyper[6], hyper[7]};
}

bool changes_nothing(const float* squares, const float* hyper, const float* overflow) {
    return (overflow != nullptr && *overflow > 0.0f) || (hyper[8] > 0.0f && !(*squares <= hyper[8]));
}

float clip_factor(const Hyper& h, const float* squares) {
    const float norm = std::sqrt(*squares);
    return h.clip > 0.0f && norm > h.clip ? h.clip / (norm + 1e-6f) : 1.0f;
}

// Elements from here on take no decay.
std::int64_t end_of_decay(const AdamShape& s) {
    return s.decay < 0.0f ? std::clamp<std::int64_t>(s.decayed - s.offset, 0, s.elements) : s.elements;
}

void adamw(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
           float* master, Dst m, Dst v, Dst w, void*) {
    if (changes_nothing(squares, hyper, overflow)) return;
    const Hyper h = hyper_of(s, hyper);
    const float factor = clip_factor(h, squares);
    float* wide_m = scratch(Slot::a, chunk);
    float* wide_v = scratch(Slot::b, chunk);
    // Chunks end where the decayed part ends, so that each has one decay.
    const std::int64_t boundary = end_of_decay(s);
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

void adamw_mxfp8(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
                 float* master, std::uint8_t* code, std::uint8_t* scale, Dst v, Dst w, void*) {
    if (changes_nothing(squares, hyper, overflow)) return;
    const Hyper h = hyper_of(s, hyper);
    const float factor = clip_factor(h, squares);
    float* first = scratch(Slot::a, chunk);
    float* wide_v = scratch(Slot::b, chunk);
    const std::int64_t boundary = end_of_decay(s);
    static_assert(chunk % mxfp8_block == 0);
    for (std::int64_t i = 0; i < s.elements; i += chunk) {
        const std::int64_t n = std::min(chunk, s.elements - i), decayed = std::clamp<std::int64_t>(boundary - i, 0, n);
        float* second = target(v, i, wide_v);
        if (v.type == Type::bf16) load(v, i, n, second);
        decode_mxfp8(code + i, scale + i / mxfp8_block, n, first);
        adamw_chunk(h, factor, h.decay, g + i, decayed, master + i, first, second);
        adamw_chunk(h, factor, 0.0f, g + i + decayed, n - decayed, master + i + decayed, first + decayed,
                    second + decayed);
        encode_mxfp8(first, n, code + i, scale + i / mxfp8_block);
        flush(v, i, n, second);
        if (w.data != nullptr) store(w, i, n, master + i);
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
    table.adamw_mxfp8 = adamw_mxfp8;
    table.cast = cast;
    table.reduce_sum = reduce_sum;
    table.reduce_max = reduce_max;
}

} // namespace moe::cpu
