// Rotary position embedding with optional QK-norm, for packed qkv and for latent attention, forward and backward.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

// Rotation angles of one position: cosines and sines of position * theta^(-i / half), i < half.
class Rotation {
public:
    Rotation(std::int64_t half, double theta, bool interleaved, const RopeScale& scale)
        : half_(half),
          interleaved_(interleaved),
          magnitude_(static_cast<float>(scale.magnitude)),
          frequency_(scratch(Slot::a, half)),
          cos_(scratch(Slot::b, half)),
          sin_(scratch(Slot::c, half)) {
        for (std::int64_t i = 0; i < half; ++i) {
            const double f = std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
            const double u = scale.turns > 0.0 ? f * scale.turns : static_cast<double>(i);
            const double keep = std::clamp((u - scale.low) / (scale.high - scale.low), 0.0, 1.0);
            frequency_[i] = static_cast<float>(f * (keep + (1.0 - keep) / scale.factor));
        }
    }

    // The product is reduced to one turn in double: an FP32 angle of some 10^5 radians has lost its third decimal.
    void set(std::int32_t position) {
        constexpr double turn = 2.0 * std::numbers::pi;
        for (std::int64_t i = 0; i < half_; ++i) {
            const double angle = static_cast<double>(position) * static_cast<double>(frequency_[i]);
            cos_[i] = static_cast<float>(angle - turn * std::nearbyint(angle / turn));
        }
        Out(sin_, half_) = In(cos_, half_).sin() * magnitude_;
        Out(cos_, half_) = In(cos_, half_).cos() * magnitude_;
    }

    // Turns x[0, 2 half) forward (sign 1) or, its transpose, back (sign -1).
    void turn(float* x, float sign) const {
        if (interleaved_) {
            for (std::int64_t i = 0; i < half_; ++i) {
                const float even = x[2 * i], odd = x[2 * i + 1], s = sign * sin_[i];
                x[2 * i] = even * cos_[i] - odd * s;
                x[2 * i + 1] = odd * cos_[i] + even * s;
            }
            return;
        }
        float* y = x + half_;
        for (std::int64_t i = 0; i < half_; ++i) {
            const float first = x[i], second = y[i], s = sign * sin_[i];
            x[i] = first * cos_[i] - second * s;
            y[i] = second * cos_[i] + first * s;
        }
    }

private:
    std::int64_t half_;
    bool interleaved_;
    float magnitude_;
    float *frequency_, *cos_, *sin_;
};

std::int64_t row_width(const RopeShape& s) {
    const int v = s.v_dim > 0 ? s.v_dim : s.head_dim;
    return static_cast<std::int64_t>(s.heads + s.kv_heads) * s.head_dim + static_cast<std::int64_t>(s.kv_heads) * v;
}

float query_factor(const QueryScale& s, std::int32_t position) {
    return static_cast<float>(1.0 + s.beta * std::log1p(std::floor((position + s.offset) / s.positions)));
}

// Weights of a norm; none: ones.
const float* weights(Src w, bool norm, std::int64_t d, Slot slot) {
    if (!norm) return nullptr;
    float* wide = scratch(slot, d);
    if (w.data != nullptr) return read(w, 0, d, wide);
    std::fill_n(wide, d, 1.0f);
    return wide;
}

void rope(const RopeShape& s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd, void*) {
    Rotation rotation(s.rotary_dim / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t width = row_width(s), d = s.head_dim;
    const int turned = s.heads + s.kv_heads;
    const float* weight_q = weights(wq, s.norm, d, Slot::d);
    const float* weight_k = weights(wk, s.norm, d, Slot::e);
    float* row = scratch(Slot::f, width);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const std::int32_t position = positions[r / s.batch];
        if (r % s.batch == 0) rotation.set(position);
        load(qkv, r * width, width, row);
        for (int h = 0; h < turned; ++h) {
            float* x = row + h * d;
            if (s.norm_behind) rotation.turn(x, 1.0f);
            if (s.norm) {
                Out head(x, d);
                const float mean = head.square().sum() / static_cast<float>(d);
                const float scale = 1.0f / std::sqrt(mean + static_cast<float>(s.eps));
                rstd[r * turned + h] = scale;
                head *= In(h < s.heads ? weight_q : weight_k, d) * scale;
            }
            if (!s.norm_behind) rotation.turn(x, 1.0f);
        }
        if (s.query_scale.beta != 0.0) Out(row, s.heads * d) *= query_factor(s.query_scale, position);
        store(out, r * width, width, row);
    }
}

void rope_grad(const RopeShape& s, Src dout, const std::int32_t* positions, Src qkv, Src wq, Src wk, const float* rstd,
               Dst dqkv, float* dwq, float* dwk, void*) {
    Rotation rotation(s.rotary_dim / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t width = row_width(s), d = s.head_dim;
    const int turned = s.heads + s.kv_heads;
    const float* weight_q = weights(wq, s.norm, d, Slot::d);
    const float* weight_k = weights(wk, s.norm, d, Slot::e);
    float* row = scratch(Slot::f, width);
    float* before = scratch(Slot::g, turned * d);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        const std::int32_t position = positions[r / s.batch];
        if (r % s.batch == 0) rotation.set(position);
        load(dout, r * width, width, row);
        if (s.query_scale.beta != 0.0) Out(row, s.heads * d) *= query_factor(s.query_scale, position);
        if (s.norm) load(qkv, r * width, turned * d, before);
        for (int h = 0; h < turned; ++h) {
            if (!s.norm_behind) rotation.turn(row + h * d, -1.0f);
            if (!s.norm) continue;
            if (s.norm_behind) rotation.turn(before + h * d, 1.0f);
            Out grad(row + h * d, d);
            const In x(before + h * d, d), w(h < s.heads ? weight_q : weight_k, d);
            const float scale = rstd[r * turned + h];
            float* const sum = h < s.heads ? dwq : dwk;
            if (sum != nullptr) Out(sum, d) += grad * x * scale;
            const float along = (grad * w * x).sum() * scale * scale * scale / static_cast<float>(d);
            grad = grad * w * scale - x * along;
            if (s.norm_behind) rotation.turn(row + h * d, -1.0f);
        }
        store(dqkv, r * width, width, row);
    }
}

void mla_rope(const MlaRopeShape& s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k, Dst v,
              void*) {
    Rotation rotation(s.rope / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v, down = s.kv_lora + s.rope;
    float* row = scratch(Slot::f, s.heads * qk);
    float* shared = scratch(Slot::g, s.rope);
    float* wide_kv = scratch(Slot::h, s.heads * source);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        if (r % s.batch == 0) rotation.set(positions[r / s.batch]);
        load(q, r * s.heads * qk, s.heads * qk, row);
        for (int h = 0; h < s.heads; ++h) rotation.turn(row + h * qk + s.nope, 1.0f);
        if (s.query_scale.beta != 0.0) Out(row, s.heads * qk) *= query_factor(s.query_scale, positions[r / s.batch]);
        store(q_out, r * s.heads * qk, s.heads * qk, row);

        load(kv_down, r * down + s.kv_lora, s.rope, shared);
        rotation.turn(shared, 1.0f);
        const float* from = read(kv, r * s.heads * source, s.heads * source, wide_kv);
        for (int h = 0; h < s.heads; ++h) {
            std::copy_n(from + h * source, s.nope, row + h * qk);
            std::copy_n(shared, s.rope, row + h * qk + s.nope);
            store(v, (r * s.heads + h) * s.v, s.v, from + h * source + s.nope);
        }
        store(k, r * s.heads * qk, s.heads * qk, row);
    }
}

void mla_rope_grad(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq, Dst dkv,
                   Dst dkv_down, void*) {
    Rotation rotation(s.rope / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v, down = s.kv_lora + s.rope;
    float* row = scratch(Slot::f, s.heads * qk);
    float* shared = scratch(Slot::g, s.rope);
    float* wide_dkv = scratch(Slot::h, s.heads * source);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        if (r % s.batch == 0) rotation.set(positions[r / s.batch]);
        load(dq_out, r * s.heads * qk, s.heads * qk, row);
        for (int h = 0; h < s.heads; ++h) rotation.turn(row + h * qk + s.nope, -1.0f);
        if (s.query_scale.beta != 0.0) Out(row, s.heads * qk) *= query_factor(s.query_scale, positions[r / s.batch]);
        store(dq, r * s.heads * qk, s.heads * qk, row);

        load(dk, r * s.heads * qk, s.heads * qk, row);
        std::fill_n(shared, s.rope, 0.0f);
        for (int h = 0; h < s.heads; ++h) {
            Out(shared, s.rope) += In(row + h * qk + s.nope, s.rope);
            std::copy_n(row + h * qk, s.nope, wide_dkv + h * source);
            load(dv, (r * s.heads + h) * s.v, s.v, wide_dkv + h * source + s.nope);
        }
        rotation.turn(shared, -1.0f); // All heads have the same angle, so turning the sum back turns each back.
        store(dkv, r * s.heads * source, s.heads * source, wide_dkv);
        store(dkv_down, r * down + s.kv_lora, s.rope, shared);
    }
}

void latent_rope(const MlaRopeShape& s, Src q, Src absorbed, Src latent, Src kv_down, const std::int32_t* positions,
                 Dst q_out, Dst k, void*) {
    Rotation rotation(s.rope / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t wide = s.kv_lora + s.rope, qk = s.nope + s.rope;
    float* row = scratch(Slot::f, wide);
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        if (r % s.batch == 0) rotation.set(positions[r / s.batch]);
        for (int h = 0; h < s.heads; ++h) {
            load(absorbed, (r * s.heads + h) * s.kv_lora, s.kv_lora, row);
            load(q, (r * s.heads + h) * qk + s.nope, s.rope, row + s.kv_lora);
            rotation.turn(row + s.kv_lora, 1.0f);
            store(q_out, (r * s.heads + h) * wide, wide, row);
        }
        load(latent, r * s.kv_lora, s.kv_lora, row);
        load(kv_down, r * wide + s.kv_lora, s.rope, row + s.kv_lora);
        rotation.turn(row + s.kv_lora, 1.0f);
        store(k, r * wide, wide, row);
    }
}

void latent_rope_grad(const MlaRopeShape& s, Src dq_out, Src dk, Src dq_nope, const std::int32_t* positions, Dst dq,
                      Dst dlatent, Dst dkv_down, void*) {
    Rotation rotation(s.rope / 2, s.theta, s.interleaved, s.scale);
    const std::int64_t wide = s.kv_lora + s.rope, qk = s.nope + s.rope;
    float* row = scratch(Slot::f, std::max(wide, qk));
    for (std::int64_t r = 0; r < s.tokens; ++r) {
        if (r % s.batch == 0) rotation.set(positions[r / s.batch]);
        for (int h = 0; h < s.heads; ++h) {
            load(dq_nope, (r * s.heads + h) * s.nope, s.nope, row);
            load(dq_out, (r * s.heads + h) * wide + s.kv_lora, s.rope, row + s.nope);
            rotation.turn(row + s.nope, -1.0f);
            store(dq, (r * s.heads + h) * qk, qk, row);
        }
        load(dk, r * wide, wide, row);
        rotation.turn(row + s.kv_lora, -1.0f);
        store(dlatent, r * s.kv_lora, s.kv_lora, row);
        store(dkv_down, r * wide + s.kv_lora, s.rope, row + s.kv_lora);
    }
}

} // namespace

void add_rope(Kernels& table) {
    table.rope = rope;
    table.rope_grad = rope_grad;
    table.mla_rope = mla_rope;
    table.mla_rope_grad = mla_rope_grad;
    table.latent_rope = latent_rope;
    table.latent_rope_grad = latent_rope_grad;
}

} // namespace moe::cpu
