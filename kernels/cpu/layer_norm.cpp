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

// The columns of queries, or of keys: where they begin, how many there are here and on all ranks, and what is theirs.
struct Part {
    std::int64_t from, cols, all;
    const float* weight;
    int place; // among the sums of a row
    float share;

    float rstd(const HeadsNormShape& s, float squares) const {
        return 1.0f / std::sqrt(squares / static_cast<float>(all) + static_cast<float>(s.eps));
    }
    In of(const float* row) const { return {row + from, cols}; }
    Out of(float* row) const { return {row + from, cols}; }
    In weights() const { return {weight, cols}; }
};

std::array<Part, 2> parts_of(const HeadsNormShape& s, Src wq, Src wk) {
    const float *q = nullptr, *k = nullptr;
    if (wq.data != nullptr) q = read(wq, 0, s.queries, scratch(Slot::a, s.queries));
    if (wk.data != nullptr) k = read(wk, 0, s.keys, scratch(Slot::b, s.keys));
    return {Part{0, s.queries, s.all_queries, q, 0, 1.0f}, Part{s.queries, s.keys, s.all_keys, k, 1, s.key_share}};
}

void heads_squares(const HeadsNormShape& s, Src x, float* squares, void*) {
    float* wide = scratch(Slot::c, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const float* row = read(x, r * s.width, s.width, wide);
        for (const Part& part : parts_of(s, {}, {}))
            squares[2 * r + part.place] = part.share * part.of(row).square().sum();
    }
}

void heads_norm(const HeadsNormShape& s, Src x, const float* squares, Src wq, Src wk, Dst y, void*) {
    const std::array<Part, 2> parts = parts_of(s, wq, wk);
    float* row = scratch(Slot::c, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        load(x, r * s.width, s.width, row);
        for (const Part& part : parts) part.of(row) *= part.weights() * part.rstd(s, squares[2 * r + part.place]);
        store(y, r * s.width, s.width, row);
    }
}

void heads_along(const HeadsNormShape& s, Src dy, Src x, Src wq, Src wk, float* along, void*) {
    const std::array<Part, 2> parts = parts_of(s, wq, wk);
    float* wide_dy = scratch(Slot::c, s.width);
    float* wide_x = scratch(Slot::d, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const float* grad = read(dy, r * s.width, s.width, wide_dy);
        const float* in = read(x, r * s.width, s.width, wide_x);
        for (const Part& part : parts)
            along[2 * r + part.place] = part.share * (part.of(grad) * part.weights() * part.of(in)).sum();
    }
}

void heads_norm_grad(const HeadsNormShape& s, Src dy, Src x, const float* squares, const float* along, Src wq, Src wk,
                     Dst dx, float* dwq, float* dwk, void*) {
    const std::array<Part, 2> parts = parts_of(s, wq, wk);
    float* row = scratch(Slot::c, s.width);
    float* wide_x = scratch(Slot::d, s.width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        load(dy, r * s.width, s.width, row);
        const float* in = read(x, r * s.width, s.width, wide_x);
        for (const Part& part : parts) {
            const float scale = part.rstd(s, squares[2 * r + part.place]);
            const float back = along[2 * r + part.place] * scale * scale * scale / static_cast<float>(part.all);
            Out grad = part.of(row);
            Out(part.place == 0 ? dwq : dwk, part.cols) += grad * part.of(in) * scale;
            grad = grad * part.weights() * scale - part.of(in) * back;
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
