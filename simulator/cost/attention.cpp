// Attention kernels: a rate that grows with sequence length towards the stack's limit.
#include "planner/machine/hardware.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/op.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace moe::cost {

// rate = limit * s / (s + half): prologue, masked blocks on the diagonal and tails cost a fixed number of keys. With
// half = 1200 tokens, 0.72 forward and 0.57 backward this gives cuDNN's figures of arXiv 2603.07685 Table 9 within 4 %:
// Hopper 553/422 TFLOPS at 4K and 638/523 at 16K, Blackwell 1324/1083 and 1698/1298. Over picked keys the rate grows
// with their number: 0.28 and half = 183 give cuDNN's backward of NVIDIA/cudnn-frontend pull request 318 on a B200 with
// 128 to 2,048 of 4,096 keys within 8 % (before it 292, 504, 572, 611 TFLOPS, with it 307, 557, 638, 684).
double attention_seconds(const Rates& rates, const program::Op& op, machine::Precision precision) {
    // FlashAttention-3 reaches, on H100, 740 TFLOPS in FP16 and close to 1200 in FP8, where the softmax between the two
    // products gains nothing (arXiv 2407.08608, abstract); taken for every kernel, machine and direction.
    constexpr double fp8_gain = 1200.0 / 740.0;
    const auto* attr = std::get_if<program::AttentionAttr>(&op.attr);
    const stack::StackCosts& c = *rates.costs;
    const auto* state = std::get_if<program::StateAttr>(&op.attr); // taken to be as fast on its FLOPs
    const bool forward = op.kind == program::OpKind::attention || op.kind == program::OpKind::pick_keys ||
                         op.kind == program::OpKind::delta_rule || op.kind == program::OpKind::ssd;
    const bool picked = attr != nullptr && attr->picked > 0;
    double limit = forward ? c.attention_forward : c.attention_backward;
    if (picked) limit = forward ? c.attention_picked_forward : c.attention_picked_backward;
    const double half = picked ? c.attention_picked_half_length : c.attention_half_length;
    double keys = 1.0;
    if (picked) {
        keys = static_cast<double>(attr->picked);
    } else if (attr != nullptr) {
        keys = static_cast<double>(attr->seq_k);
        for (const std::int64_t most : {attr->window, attr->chunk})
            if (most > 0) keys = std::min(keys, static_cast<double>(most));
        // Under a causal mask a query sees half of its document in the mean.
        if (attr->documents) keys = std::min(keys, 2.0 * attr->visible * static_cast<double>(attr->seq_k));
    } else if (state != nullptr) {
        const std::int64_t positions = state->rows / state->batch;
        keys = static_cast<double>(positions);
    }
    // Products of narrow heads fill tensor cores less, and those of FP8 take less time; exponentials, which run beside
    // the forward's products, take what they take.
    const double gain = precision > machine::Precision::bf16 ? fp8_gain : 1.0;
    const double width = attr != nullptr    ? std::min(1.0, attr->v_dim / 128.0)
                         : state != nullptr ? std::min(1.0, state->value_dim / 128.0)
                                            : 1.0;
    const double products = std::sqrt(width) / gain;
    const double time = forward && !picked ? std::max(products, c.attention_exponentials) : products;
    const double share = width / time * std::max(keys, 1.0) / (std::max(keys, 1.0) + half);
    const double peak = rates.hardware->peak_flops[static_cast<std::size_t>(machine::Precision::bf16)];
    const double compute = op.flops / (peak * limit * std::sqrt(c.clock) * share * rates.sm_share);
    const double memory = op.bytes / (rates.hardware->memory_bandwidth * c.memory);
    return std::max(compute, memory) + c.kernel_seconds;
}

namespace {

// By kernels that multiply in FP32 on a GPU's ordinary units. On an H200 they reached 10 to 21 TFLOPS forward and 8 to
// 12 backward (docs/notes/kernels-attention.md), of 67 in FP32: the middles.
double plain_attention_seconds(const Rates& rates, const program::Op& op) {
    constexpr double forward = 15.5 / 67.0, backward = 10.0 / 67.0;
    const double peak = rates.hardware->peak_flops[static_cast<std::size_t>(machine::Precision::fp32)];
    const double rate = peak * (op.kind == program::OpKind::attention ? forward : backward) * rates.sm_share;
    const double memory = op.bytes / (rates.hardware->memory_bandwidth * rates.costs->memory);
    return std::max(op.flops / rate, memory) + rates.costs->kernel_seconds;
}

// Keys of a row of sparse attention in the mean: those that it sees, and those that it has.
struct RowKeys {
    double seen, picked;
};
RowKeys row_keys(const program::AttentionAttr& a) {
    const double longest = static_cast<double>(a.seq_k) * (a.documents ? 2.0 * a.visible : 1.0),
                 most = std::min(static_cast<double>(a.picked), longest); // The first rows see fewer.
    return {longest / 2.0, most * (1.0 - most / (2.0 * longest))};
}

// Work of an op of sparse attention by the rate of its kernels: TFLOPS of an H200 (docs/notes/kernels-sparse.md).
struct Part {
    double flops, rate;
};

// On tensor cores. A tile of 64 keys multiplies with every row that has one of them: over picked keys, gradients of
// keys work through all that rows see.
std::array<Part, 2> tensor_parts(const program::Op& op, const program::AttentionAttr& a) {
    const double rows = 2.0 * static_cast<double>(a.batch * a.seq_q), qk = a.qk_dim, v = a.v_dim,
                 index = static_cast<double>(a.index.heads) * a.index.dim;
    const double heads = 64.0 * std::ceil(a.heads / 64.0); // of whole tiles
    const RowKeys keys = row_keys(a);
    switch (op.kind) {
    case program::OpKind::attention:
        return {Part{rows * keys.picked * heads * (qk + v), 455.0}, Part{0.0, 1.0}};
    case program::OpKind::attention_grad:
        return {Part{rows * keys.picked * heads * (2.0 * qk + v), 395.0},
                Part{rows * keys.seen * a.heads * 2.0 * (qk + v), 370.0}};
    case program::OpKind::pick_keys:
        return {Part{rows * keys.seen * a.heads * qk, 155.0}, Part{0.0, 1.0}};
    default:
        return {Part{rows * keys.picked * heads * 2.0 * qk, 245.0},
                Part{rows * (keys.picked * 3.0 + keys.seen * 2.0) * index, 350.0}};
    }
}

// By loops on a GPU's ordinary units, of which gradients of keys ask every row for every key.
std::array<Part, 2> loop_parts(const program::Op& op, const program::AttentionAttr& a) {
    constexpr double forward = 1.4, backward = 0.35; // and the indexer's as backward
    const double rows = 2.0 * static_cast<double>(a.batch * a.seq_q), qk = a.qk_dim, v = a.v_dim;
    const RowKeys keys = row_keys(a);
    switch (op.kind) {
    case program::OpKind::attention:
        return {Part{rows * keys.picked * a.heads * (qk + v), forward}, Part{0.0, 1.0}};
    case program::OpKind::attention_grad:
        return {Part{rows * keys.picked * a.heads * (3.0 * qk + 2.0 * v), backward}, Part{0.0, 1.0}};
    case program::OpKind::pick_keys:
        return {Part{rows * keys.seen * a.heads * qk, backward}, Part{0.0, 1.0}};
    default:
        return {Part{rows * keys.picked * (a.heads * qk + 3.0 * a.index.heads * a.index.dim), backward},
                Part{0.0, 1.0}};
    }
}

// Sparse attention on a GPU: the rotary columns of its keys are no part of the value. (What DeepSeek-V4's layers see,
// which nothing here executes, has the price of published kernels.)
bool by_own_sparse(const Rates& rates, const program::Op& op, const program::AttentionAttr& a) {
    return !rates.hardware->cpu && (op.kind == program::OpKind::pick_keys || (a.picked > 0 && a.qk_dim > a.v_dim));
}

double own_sparse_seconds(const Rates& rates, const program::Op& op, machine::Precision precision) {
    constexpr double tera = 1e12, h200 = 989.4, h200_fp32 = 67.0; // TFLOPS
    constexpr int latent = 576, value = 512, index_dim = 128;
    const auto& a = std::get<program::AttentionAttr>(op.attr);
    const bool on_hopper = std::floor(rates.hardware->compute_capability) == 9.0,
               picks = op.kind == program::OpKind::pick_keys, loss = op.kind == program::OpKind::pick_keys_grad;
    const bool fits =
        picks ? a.qk_dim == index_dim : a.qk_dim == latent && a.v_dim == value && (!loss || a.index.dim == index_dim);
    const bool tensor = on_hopper && fits && precision != machine::Precision::fp32;
    const auto peak = [&](machine::Precision p) { return rates.hardware->peak_flops[static_cast<std::size_t>(p)]; };
    const double speed =
        tensor ? peak(machine::Precision::bf16) / (h200 * tera) : peak(machine::Precision::fp32) / (h200_fp32 * tera);
    double seconds = rates.costs->kernel_seconds;
    for (const Part& part : tensor ? tensor_parts(op, a) : loop_parts(op, a))
        seconds += part.flops / (part.rate * tera * speed * rates.sm_share);
    return std::max(seconds, op.bytes / (rates.hardware->memory_bandwidth * rates.costs->memory));
}

} // namespace

// Of an H100's peak in BF16, whole sequences of 4,096 and documents of 512 tokens: 445 and 195 TFLOPS forward, 245 and
// 147 backward (docs/notes/kernels-attention.md), so 545 s / (s + 918) and 271 s / (s + 431). The card's clock was such
// that cuDNN had 0.91 of what attention_seconds() says without a clock.
double own_attention_seconds(const Rates& rates, const program::Op& op, machine::Precision precision) {
    const auto& attr = std::get<program::AttentionAttr>(op.attr);
    if (by_own_sparse(rates, op, attr)) return own_sparse_seconds(rates, op, precision);
    if (!attr.documents) return attention_seconds(rates, op, precision);
    if (precision == machine::Precision::fp32) return plain_attention_seconds(rates, op);
    stack::StackCosts costs = *rates.costs;
    const bool forward = op.kind == program::OpKind::attention;
    costs.attention_forward = 0.606, costs.attention_backward = 0.301;
    costs.attention_half_length = forward ? 918.0 : 431.0;
    Rates own = rates;
    own.costs = &costs;
    return attention_seconds(own, op, machine::Precision::bf16);
}

// Rules of layers with a state by our kernels: TFLOPS of an H100 by their FLOPs, on tensor cores in BF16 of 989 and
// with FP32 multiply-adds of 67 (docs/notes/kernels-delta.md, docs/notes/kernels-ssd.md).
double own_state_seconds(const Rates& rates, const program::Op& op, machine::Precision precision) {
    constexpr double h100 = 989.4, h100_fp32 = 67.0;
    const bool plain = precision == machine::Precision::fp32,
               ssd = op.kind == program::OpKind::ssd || op.kind == program::OpKind::ssd_grad,
               forward = op.kind == program::OpKind::ssd || op.kind == program::OpKind::delta_rule;
    const double on_tensor_cores = ssd ? (forward ? 72.0 : 56.0) : (forward ? 85.0 : 44.0), on_others = ssd ? 4.3 : 3.0;
    const double peak = rates.hardware->peak_flops[static_cast<std::size_t>(plain ? machine::Precision::fp32
                                                                                  : machine::Precision::bf16)],
                 rate = plain ? on_others * peak / h100_fp32 : on_tensor_cores * peak / h100; // FLOP/s
    return std::max(op.flops / (rate * rates.sm_share),
                    op.bytes / (rates.hardware->memory_bandwidth * rates.costs->memory)) +
           rates.costs->kernel_seconds;
}

// On a CPU the host is the device, and documents are left to the kernel that was measured without. Our own
// deterministic backward reaches 0.93 to 1.12 of the rate of the library's in any order
// (docs/notes/kernels-attention.md), of whose calls profiles have many.
std::optional<program::Op> CostModel::measured_as(const program::Op& op) const {
    const machine::Hardware& hardware = *plan_.hardware;
    program::Op other = op;
    if (hardware.cpu && op.kind == program::OpKind::adamw_on_host) {
        other.kind = program::OpKind::adamw;
        return other;
    }
    auto* const a = std::get_if<program::AttentionAttr>(&other.attr);
    if (a == nullptr) return std::nullopt;
    if (hardware.cpu && a->documents) {
        a->documents = false;
        return other;
    }
    const bool own = op.kind == program::OpKind::attention_grad && a->deterministic && !a->documents &&
                     a->picked == 0 && a->chunk == 0 && a->causal && a->seq_q == a->seq_k &&
                     plan_.activations() == machine::Precision::bf16 && hardware.compute_capability == 9.0 &&
                     plan::stack_traits(plan_).takes_attention_scratch;
    if (!own || !memory::has_own_backward({a->batch, a->heads, a->kv_heads, a->qk_dim, a->v_dim, a->seq_q, a->window,
                                           true, hardware.sm_count}))
        return std::nullopt;
    a->deterministic = false;
    return other;
}

} // namespace moe::cost
