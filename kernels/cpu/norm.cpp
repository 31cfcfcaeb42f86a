// RMSNorm and the row-wise sums and scalings around it, forward and backward.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void rmsnorm(Src x, Src w, Dst y, float* rstd, std::int64_t rows, std::int64_t cols, std::int64_t stride, double eps,
             void*) {
    if (stride == 0) stride = cols;
    const In weight(read(w, 0, cols, scratch(Slot::a, cols)), cols);
    float* wide_x = scratch(Slot::b, cols);
    float* wide_y = scratch(Slot::c, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In in(read(x, r * stride, cols, wide_x), cols);
        const float mean = in.square().sum() / static_cast<float>(cols);
        rstd[r] = 1.0f / std::sqrt(mean + static_cast<float>(eps));
        float* out = target(y, r * cols, wide_y);
        Out(out, cols) = in * rstd[r] * weight;
        flush(y, r * cols, cols, out);
    }
}

// Computes, with n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), dw = dy n.
void rmsnorm_grad(Src dy, Src x, Src w, const float* rstd, Src dresidual, Dst dx, float* dw, std::int64_t rows,
                  std::int64_t cols, std::int64_t stride, void*) {
    if (stride == 0) stride = cols;
    const In weight(read(w, 0, cols, scratch(Slot::a, cols)), cols);
    float* wide_x = scratch(Slot::b, cols);
    float* wide_dy = scratch(Slot::c, cols);
    float* wide_residual = scratch(Slot::d, cols);
    float* wide_dx = scratch(Slot::e, cols);
    Out sum(dw, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In in(read(x, r * stride, cols, wide_x), cols);
        const In grad(read(dy, r * cols, cols, wide_dy), cols);
        const float s = rstd[r];
        sum += grad * in * s;
        const float along = (grad * weight * in).sum() * s * s * s / static_cast<float>(cols);
        float* out = target(dx, r * stride, wide_dx);
        if (dresidual.data == nullptr) {
            Out(out, cols) = grad * weight * s - in * along;
        } else {
            Out(out, cols) =
                In(read(dresidual, r * cols, cols, wide_residual), cols) + (grad * weight * s - in * along);
        }
        flush(dx, r * stride, cols, out);
    }
}

// Heads of a row one by one: the inverse of each one's root mean square, and, going back, what dy adds along it.
void value_norm(const ValueNormShape& s, Src x, Dst y, void*) {
    float* wide_x = scratch(Slot::a, s.dim);
    float* wide_y = scratch(Slot::b, s.dim);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        move(x, t * s.x_width(), y, t * s.width(), s.front);
        for (int h = 0; h < s.heads; ++h) {
            const std::int64_t from = t * s.x_width() + s.source() + std::int64_t{h} * s.dim,
                               to = t * s.width() + s.front + std::int64_t{h} * s.dim;
            const In in(read(x, from, s.dim, wide_x), s.dim);
            const float rstd =
                1.0f / std::sqrt(in.square().sum() / static_cast<float>(s.dim) + static_cast<float>(s.eps));
            float* out = target(y, to, wide_y);
            Out(out, s.dim) = in * rstd;
            flush(y, to, s.dim, out);
        }
    }
}

void value_norm_grad(const ValueNormShape& s, Src dy, Src x, Dst dx, void*) {
    float* wide_x = scratch(Slot::a, s.dim);
    float* wide_dy = scratch(Slot::b, s.dim);
    float* wide_key = scratch(Slot::c, s.dim);
    float* wide_dx = scratch(Slot::d, s.dim);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        move(dy, t * s.width(), dx, t * s.x_width(), s.from_keys ? s.source() : s.front);
        for (int h = 0; h < s.heads; ++h) {
            const std::int64_t at = s.source() + std::int64_t{h} * s.dim, from = t * s.x_width() + at,
                               of = t * s.width() + s.front + std::int64_t{h} * s.dim;
            const In in(read(x, from, s.dim, wide_x), s.dim), grad(read(dy, of, s.dim, wide_dy), s.dim);
            const auto n = static_cast<float>(s.dim);
            const float rstd = 1.0f / std::sqrt(in.square().sum() / n + static_cast<float>(s.eps));
            const float along = (grad * in).sum() * rstd * rstd * rstd / n;
            float* out = target(dx, from, wide_dx);
            Out(out, s.dim) = grad * rstd - in * along;
            if (s.from_keys) Out(out, s.dim) += In(read(dy, t * s.width() + at, s.dim, wide_key), s.dim);
            flush(dx, from, s.dim, out);
        }
    }
}

void scale(Src x, Src w, double factor, Dst y, std::int64_t n, void*) {
    const float by = static_cast<float>(factor) * (w.data != nullptr ? value(w, 0) : 1.0f);
    float* wide_x = scratch(Slot::a, chunk);
    float* wide_y = scratch(Slot::b, chunk);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        float* out = target(y, i, wide_y);
        Out(out, m) = In(read(x, i, m, wide_x), m) * by;
        flush(y, i, m, out);
    }
}

void clip(Src x, double limit, bool soft, Dst y, std::int64_t n, void*) {
    float* wide_x = scratch(Slot::a, chunk);
    float* wide_y = scratch(Slot::b, chunk);
    const auto most = static_cast<float>(limit);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        float* out = target(y, i, wide_y);
        const In in(read(x, i, m, wide_x), m);
        if (soft)
            Out(out, m) = most * (in / most).tanh();
        else
            Out(out, m) = in.max(-most).min(most);
        flush(y, i, m, out);
    }
}

void clip_grad(Src dy, Src x, double limit, bool soft, Dst dx, std::int64_t n, void*) {
    float* wide_dy = scratch(Slot::a, chunk);
    float* wide_x = scratch(Slot::b, chunk);
    float* wide_dx = scratch(Slot::c, chunk);
    const auto most = static_cast<float>(limit);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        float* out = target(dx, i, wide_dx);
        const In in(read(x, i, m, wide_x), m), grad(read(dy, i, m, wide_dy), m);
        if (soft)
            Out(out, m) = grad * (1.0f - (in / most).tanh().square());
        else
            Out(out, m) = grad * (in.abs() <= most).cast<float>();
        flush(dx, i, m, out);
    }
}

void add(Src a, Src b, Dst y, std::int64_t n, void*) {
    float* wide_a = scratch(Slot::a, chunk);
    float* wide_b = scratch(Slot::b, chunk);
    float* wide_y = scratch(Slot::c, chunk);
    for (std::int64_t i = 0; i < n; i += chunk) {
        const std::int64_t m = std::min(chunk, n - i);
        float* out = target(y, i, wide_y);
        Out(out, m) = In(read(a, i, m, wide_a), m) + In(read(b, i, m, wide_b), m);
        flush(y, i, m, out);
    }
}

void copy_columns(const ColumnsShape& s, Src x, Dst y, void*) {
    float* wide_x = scratch(Slot::a, s.cols);
    float* wide_y = scratch(Slot::b, s.cols);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        const std::int64_t from = r * s.x_stride + s.from, to = r * s.y_stride + s.to;
        if (!s.accumulate) {
            move(x, from, y, to, s.cols);
            continue;
        }
        const In before(read(y, to, s.cols, wide_y), s.cols), added(read(x, from, s.cols, wide_x), s.cols);
        float* out = target(y, to, wide_y);
        Out(out, s.cols) = before + added;
        flush(y, to, s.cols, out);
    }
}

void bias_add(Src x, Src b, Dst y, std::int64_t rows, std::int64_t cols, void*) {
    const In bias(read(b, 0, cols, scratch(Slot::a, cols)), cols);
    float* wide_x = scratch(Slot::b, cols);
    float* wide_y = scratch(Slot::c, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        float* out = target(y, r * cols, wide_y);
        Out(out, cols) = In(read(x, r * cols, cols, wide_x), cols) + bias;
        flush(y, r * cols, cols, out);
    }
}

void bias_grad(Src dy, float* db, std::int64_t rows, std::int64_t cols, void*) {
    float* wide = scratch(Slot::a, cols);
    Out sum(db, cols);
    for (std::int64_t r = 0; r < rows; ++r) sum += In(read(dy, r * cols, cols, wide), cols);
}

void grouped_bias_add(Src rows, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                      std::int64_t cols, std::int64_t capacity, float share, void*) {
    float* wide_b = scratch(Slot::a, cols);
    float* wide_x = scratch(Slot::b, cols);
    float* wide_y = scratch(Slot::c, cols);
    std::int64_t row = 0;
    for (int e = 0; e < groups; ++e) {
        const std::int64_t end = row + rows_of(counts, e, row, capacity);
        const In bias(read(b, e * cols, cols, wide_b), cols);
        for (; row < end; ++row) {
            const float p = probs != nullptr ? share * probs[row] : share;
            float* out = target(y, row * cols, wide_y);
            Out(out, cols) = In(read(rows, row * cols, cols, wide_x), cols) + bias * p;
            flush(y, row * cols, cols, out);
        }
    }
}

void grouped_bias_grad(Src drows, const std::int32_t* counts, Src b, const float* probs, float* db, float* dprobs,
                       int groups, std::int64_t cols, std::int64_t capacity, float share, void*) {
    float* wide_b = scratch(Slot::a, cols);
    float* wide_x = scratch(Slot::b, cols);
    std::int64_t row = 0;
    for (int e = 0; e < groups; ++e) {
        const std::int64_t end = row + rows_of(counts, e, row, capacity);
        const float* bias = dprobs != nullptr ? read(b, e * cols, cols, wide_b) : nullptr;
        Out sum(db + e * cols, cols);
        for (; row < end; ++row) {
            const In grad(read(drows, row * cols, cols, wide_x), cols);
            sum += grad * (probs != nullptr ? share * probs[row] : share);
            if (dprobs != nullptr) dprobs[row] = share * (grad * In(bias, cols)).sum();
        }
    }
}

} // namespace

void add_norm(Kernels& table) {
    table.rmsnorm = rmsnorm;
    table.rmsnorm_grad = rmsnorm_grad;
    table.value_norm = value_norm;
    table.value_norm_grad = value_norm_grad;
    table.scale = scale;
    table.clip = clip;
    table.clip_grad = clip_grad;
    table.add = add;
    table.bias_add = bias_add;
    table.copy_columns = copy_columns;
    table.bias_grad = bias_grad;
    table.grouped_bias_add = grouped_bias_add;
    table.grouped_bias_grad = grouped_bias_grad;
}

} // namespace moe::cpu
