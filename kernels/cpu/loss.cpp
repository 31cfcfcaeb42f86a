// Cross-entropy over a vocabulary that may be cut into slices: the pieces between the reductions over the slices.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>
#include <limits>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

// Columns of the slice that are real vocabulary entries.
std::int64_t real_columns(const LossShape& s) { return std::clamp<std::int64_t>(s.vocab - s.first, 0, s.vocab_local); }

// The scale in FP32, times the share where there is one; 1 changes no bit.
float scale_of(const LossShape& s) { return static_cast<float>(s.scale) * (s.share != nullptr ? *s.share : 1.0f); }

void ce_max(const LossShape& s, Src logits, float* max, void*) {
    const std::int64_t columns = real_columns(s);
    float* wide = scratch(Slot::a, chunk);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        float best = -std::numeric_limits<float>::infinity();
        for (std::int64_t j = 0; j < columns; j += chunk) {
            const std::int64_t n = std::min(chunk, columns - j);
            best = std::max(best, In(read(logits, r * s.vocab_local + j, n, wide), n).maxCoeff());
        }
        max[r] = best;
    }
}

void ce_sum(const LossShape& s, Src logits, const float* max, const std::int32_t* labels, float* stat, void*) {
    const std::int64_t columns = real_columns(s);
    float* wide = scratch(Slot::a, chunk);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        double sum = 0.0;
        for (std::int64_t j = 0; j < columns; j += chunk) {
            const std::int64_t n = std::min(chunk, columns - j);
            sum += static_cast<double>((In(read(logits, r * s.vocab_local + j, n, wide), n) - max[r]).exp().sum());
        }
        const std::int64_t label = labels[r] - s.first;
        stat[2 * r] = labels[r] < 0 ? 0.0f : static_cast<float>(sum);
        stat[2 * r + 1] = label >= 0 && label < columns ? value(logits, r * s.vocab_local + label) : 0.0f;
    }
}

void ce_loss(const LossShape& s, const float* max, const float* stat, float* loss, void*) {
    double sum = 0.0;
    for (std::int64_t r = 0; r < s.rows; ++r) {
        if (stat[2 * r] == 0.0f) continue; // The row has no label.
        sum += std::log(static_cast<double>(stat[2 * r])) + static_cast<double>(max[r]) -
               static_cast<double>(stat[2 * r + 1]);
    }
    *loss += static_cast<float>(s.scale * sum * (s.share != nullptr ? static_cast<double>(*s.share) : 1.0));
}

void ce_grad(const LossShape& s, Src logits, const float* max, const float* stat, const std::int32_t* labels,
             Dst dlogits, void*) {
    const std::int64_t columns = real_columns(s);
    const float scale = scale_of(s);
    float* wide = scratch(Slot::a, chunk);
    float* wide_out = scratch(Slot::b, chunk);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        const std::int64_t label = labels[r] - s.first;
        const bool counts = labels[r] >= 0;
        const float factor = counts ? scale / stat[2 * r] : 0.0f;
        for (std::int64_t j = 0; j < s.vocab_local; j += chunk) {
            const std::int64_t n = std::min(chunk, s.vocab_local - j), at = r * s.vocab_local + j;
            const std::int64_t real = std::clamp<std::int64_t>(columns - j, 0, n);
            float* out = target(dlogits, at, wide_out);
            Out(out, real) = (In(read(logits, at, real, wide), real) - max[r]).exp() * factor;
            std::fill_n(out + real, n - real, 0.0f);
            if (counts && label >= j && label < j + real) out[label - j] -= scale;
            flush(dlogits, at, n, out);
        }
    }
}

void cross_entropy(const LossShape& s, double gradient_scale, Src logits, const std::int32_t* labels, float* max,
                   float* stat, float* loss, Dst dlogits, void*) {
    ce_max(s, logits, max, nullptr);
    ce_sum(s, logits, max, labels, stat, nullptr);
    ce_loss(s, max, stat, loss, nullptr);
    LossShape gradient = s;
    gradient.scale = gradient_scale;
    ce_grad(gradient, logits, max, stat, labels, dlogits, nullptr);
}

} // namespace

void add_loss(Kernels& table) {
    table.ce_max = ce_max;
    table.ce_sum = ce_sum;
    table.ce_loss = ce_loss;
    table.ce_grad = ce_grad;
    table.cross_entropy = cross_entropy;
}

} // namespace moe::cpu
