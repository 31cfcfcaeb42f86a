// LayerNorm, and the norms of queries and of keys over all heads of all ranks, forward and backward.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <array>
#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void layernorm(Src x, Src w, Src b, Dst y, float* stat, std::int64_t rows, std::int64_t cols, std::int64_t stride,
               double eps, void*) {
    if (stride == 0) stride = cols;
    const In weight(read(w, 0, cols, scratch(Slot::a, cols)), cols);
    const float* bias = b.data != nullptr ? read(b, 0, cols, scratch(Slot::d, cols)) : nullptr;
    float* wide_x = scratch(Slot::b, cols);
    float* wide_y = scratch(Slot::c, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In in(read(x, r * stride, cols, wide_x), cols);
        const float mean = in.sum() / static_cast<float>(cols);
        const float variance = (in - mean).square().sum() / static_cast<float>(cols);
        stat[2 * r] = 1.0f / std::sqrt(variance + static_cast<float>(eps));
        stat[2 * r + 1] = mean;
        float* out = target(y, r * cols, wide_y);
        Out(out, cols) = (in - mean) * stat[2 * r] * weight;
        if (bias != nullptr) Out(out, cols) += In(bias, cols);
        flush(y, r * cols, cols, out);
    }
}

// Computes, with n = (x - mean) rstd and g = dy w: dx = rstd (g - mean g - n mean(g n)), dw = dy n, db = dy.
void layernorm_grad(Src dy, Src x, Src w, const float* stat, Src dresidual, Dst dx, float* dw, float* db,
                    std::int64_t rows, std::int64_t cols, std::int64_t stride, void*) {
    if (stride == 0) stride = cols;
    const In weight(read(w, 0, cols, scratch(Slot::a, cols)), cols);
    float* wide_x = scratch(Slot::b, cols);
    float* wide_dy = scratch(Slot::c, cols);
    float* wide_residual = scratch(Slot::d, cols);
    float* wide_dx = scratch(Slot::e, cols);
    float* normed = scratch(Slot::f, cols);
    Out n(normed, cols), sum(dw, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In in(read(x, r * stride, cols, wide_x), cols), grad(read(dy, r * cols, cols, wide_dy), cols);
        n = (in - stat[2 * r + 1]) * stat[2 * r];
        sum += grad * n;
        if (db != nullptr) Out(db, cols) += grad;
        const float level = (grad * weight).sum() / static_cast<float>(cols);
        const float along = (grad * weight * n).sum() / static_cast<float>(cols);
        float* out = target(dx, r * stride, wide_dx);
        const auto through = (grad * weight - level - n * along) * stat[2 * r];
        if (dresidual.data == nullptr) {
            Out(out, cols) = through;
        } else {
            Out(out, cols) = In(read(dresidual, r * cols, cols, wide_residual), cols) + through;
        }
        flush(dx, r * stride, cols, out);
    }
}

// The columns of queries, 0, or of keys, 1: where they begin, how many there are here and on all ranks.
struct Part {
    std::int64_t from, cols;
    double all;
};
std::array<Part, 2> parts_of(const HeadsNormShape& s) {
    return {{{0, s.queries, static_cast<double>(s.all_queries)}, {s.queries, s.keys, static_cast<double>(s.all_keys)}}};
}

float rstd_of(const HeadsNormShape& s, const Part& part, float squares) {
    return 1.0f / std::sqrt(squares / static_cast<float>(part.all) + static_cast<float>(s.eps));
}

void heads_squares(const HeadsNormShape& s, Src x, float* squares, void*) {
    float* wide = scratch(Slot::a, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const float* row = read(x, r * s.width, s.width, wide);
        int i = 0;
        for (const Part& part : parts_of(s)) squares[2 * r + i++] = In(row + part.from, part.cols).square().sum();
    }
}

void heads_norm(const HeadsNormShape& s, Src x, const float* squares, Src wq, Src wk, Dst y, void*) {
    const float* const weights[2] = {read(wq, 0, s.queries, scratch(Slot::a, s.queries)),
                                     read(wk, 0, s.keys, scratch(Slot::b, s.keys))};
    float* row = scratch(Slot::c, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        load(x, r * s.width, s.width, row);
        int i = 0;
        for (const Part& part : parts_of(s)) {
            Out(row + part.from, part.cols) *= In(weights[i], part.cols) * rstd_of(s, part, squares[2 * r + i]);
            ++i;
        }
        store(y, r * s.width, s.width, row);
    }
}

void heads_along(const HeadsNormShape& s, Src dy, Src x, Src wq, Src wk, float* along, void*) {
    const float* const weights[2] = {read(wq, 0, s.queries, scratch(Slot::a, s.queries)),
                                     read(wk, 0, s.keys, scratch(Slot::b, s.keys))};
    float* wide_dy = scratch(Slot::c, s.width);
    float* wide_x = scratch(Slot::d, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const float* grad = read(dy, r * s.width, s.width, wide_dy);
        const float* in = read(x, r * s.width, s.width, wide_x);
        int i = 0;
        for (const Part& part : parts_of(s)) {
            along[2 * r + i] =
                (In(grad + part.from, part.cols) * In(weights[i], part.cols) * In(in + part.from, part.cols)).sum();
            ++i;
        }
    }
}

void heads_norm_grad(const HeadsNormShape& s, Src dy, Src x, const float* squares, const float* along, Src wq, Src wk,
                     Dst dx, float* dwq, float* dwk, void*) {
    const float* const weights[2] = {read(wq, 0, s.queries, scratch(Slot::a, s.queries)),
                                     read(wk, 0, s.keys, scratch(Slot::b, s.keys))};
    float* const sums[2] = {dwq, dwk};
    float* row = scratch(Slot::c, s.width);
    float* wide_x = scratch(Slot::d, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        load(dy, r * s.width, s.width, row);
        const float* in = read(x, r * s.width, s.width, wide_x);
        int i = 0;
        for (const Part& part : parts_of(s)) {
            const float scale = rstd_of(s, part, squares[2 * r + i]);
            const float back = along[2 * r + i] * scale * scale * scale / static_cast<float>(part.all);
            Out grad(row + part.from, part.cols);
            const In from(in + part.from, part.cols);
            Out(sums[i], part.cols) += grad * from * scale;
            grad = grad * In(weights[i], part.cols) * scale - from * back;
            ++i;
        }
        store(dx, r * s.width, s.width, row);
    }
}

} // namespace

void add_layer_norm(Kernels& table) {
    table.layernorm = layernorm;
    table.layernorm_grad = layernorm_grad;
    table.heads_squares = heads_squares;
    table.heads_norm = heads_norm;
    table.heads_along = heads_along;
    table.heads_norm_grad = heads_norm_grad;
}

} // namespace moe::cpu
