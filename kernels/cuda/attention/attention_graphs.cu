// The two graphs of attention in the form that cuDNN's fused engines know.
//
// They are matched by pattern: the order of masks, the scale in front of them and the softmax in six ops are what
// cuDNN's documentation of its attention pattern shows; another formula of the same value would find no engine.
#include "kernels/cuda/attention/attention_graphs.hpp"

#include <limits>

namespace moe::cuda {
namespace {

using Tensor = CudnnGraph::Tensor;

// Operands of [rows of a head, width], and their transposes [width, rows].
struct Operands {
    CudnnGraph& graph;
    const AttentionPlanShape& s;

    Tensor rows(std::int64_t id, std::int64_t heads, std::int64_t rows, std::int64_t width, std::int64_t stride) const {
        return graph.operand(id, CUDNN_DATA_BFLOAT16, {s.batch, heads, rows, width},
                             {stride, width, s.interleaved * stride, 1});
    }
    Tensor turned(std::int64_t id, std::int64_t heads, std::int64_t rows, std::int64_t width,
                  std::int64_t stride) const {
        return graph.operand(id, CUDNN_DATA_BFLOAT16, {s.batch, heads, width, rows},
                             {stride, width, 1, s.interleaved * stride});
    }
    Tensor key_grad(std::int64_t id, std::int64_t width, std::int64_t stride) const {
        if (!s.dense_key_grads) return rows(id, s.kv_heads, s.seq_k, width, stride);
        return graph.operand(id, CUDNN_DATA_BFLOAT16, {s.batch, s.kv_heads, s.seq_k, width},
                             {s.kv_heads * s.seq_k * width, s.seq_k * width, width, 1});
    }
    // A number per query, as lse lies.
    Tensor lse() const {
        return graph.operand(operand_lse, CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq_q, 1},
                             {1, s.lse_head, s.interleaved, 1});
    }
    Tensor inner(std::int64_t rows, std::int64_t cols) const {
        return graph.inner(CUDNN_DATA_FLOAT, {s.batch, s.heads, rows, cols});
    }
};

// Keeps x where a compared index holds, -infinity elsewhere.
Tensor keep_where(CudnnGraph& g, const Tensor& x, cudnnPointwiseMode_t compare, const Tensor& a, const Tensor& b) {
    const Tensor sees = g.apply(compare, a, b, CUDNN_DATA_BOOLEAN, CUDNN_DATA_BOOLEAN);
    const Tensor y = g.inner(CUDNN_DATA_FLOAT, x.dims);
    g.pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, g.scalar(-std::numeric_limits<float>::infinity()), sees, y);
    return y;
}

// Query i sees keys j <= i + seq_k - seq_q, and of those j > i + seq_k - seq_q - window.
Tensor masked(CudnnGraph& g, const AttentionPlanShape& s, Tensor x) {
    constexpr std::int64_t query_axis = 2, key_axis = 3;
    if (s.causal) {
        Tensor row = g.index(x, query_axis);
        const Tensor col = g.index(x, key_axis);
        if (s.seq_q != s.seq_k) {
            const auto add = [&](cudnnPointwiseMode_t mode, std::int64_t length) {
                row =
                    g.apply(mode, row, g.scalar(static_cast<std::int32_t>(length)), CUDNN_DATA_INT32, CUDNN_DATA_INT32);
            };
            add(CUDNN_POINTWISE_ADD, s.seq_k);
            add(CUDNN_POINTWISE_SUB, s.seq_q);
        }
        x = keep_where(g, x, CUDNN_POINTWISE_CMP_GE, row, col);
    }
    if (s.window > 0) {
        const Tensor row = g.index(x, query_axis), col = g.index(x, key_axis);
        const Tensor shifted =
            g.apply(CUDNN_POINTWISE_ADD, col, g.scalar(static_cast<float>(s.window - s.seq_k + s.seq_q)));
        x = keep_where(g, x, CUDNN_POINTWISE_CMP_GT, shifted, row);
    }
    return x;
}

} // namespace

void describe_attention(CudnnGraph& g, const AttentionPlanShape& s) {
    const Operands in{g, s};
    const Tensor q = in.rows(operand_q, s.heads, s.seq_q, s.qk_dim, s.q_batch);
    const Tensor k = in.turned(operand_k, s.kv_heads, s.seq_k, s.qk_dim, s.k_batch);
    const Tensor v = in.rows(operand_v, s.kv_heads, s.seq_k, s.v_dim, s.v_batch);
    const Tensor product = in.inner(s.seq_q, s.seq_k);
    g.matmul(q, k, product);
    const Tensor scores = masked(g, s, g.apply(CUDNN_POINTWISE_MUL, product, g.scalar(s.scale)));
    Tensor max = in.inner(s.seq_q, 1), sum = in.inner(s.seq_q, 1);
    Tensor sinks;
    if (s.sinks) {
        sinks = g.operand(operand_sinks, CUDNN_DATA_FLOAT, {1, s.heads, 1, 1}, {s.heads, 1, 1, 1});
        const Tensor over_keys = max;
        g.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, over_keys);
        max = g.apply(CUDNN_POINTWISE_MAX, over_keys, sinks);
    } else {
        g.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, max);
    }
    const Tensor weights = g.apply(CUDNN_POINTWISE_EXP, g.apply(CUDNN_POINTWISE_SUB, scores, max));
    if (s.sinks) {
        const Tensor below = in.inner(s.seq_q, 1);
        g.pointwise(CUDNN_POINTWISE_SUB, sinks, max, {}, below);
        const Tensor sink_weight = g.apply(CUDNN_POINTWISE_EXP, below), over_keys = sum;
        g.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, over_keys);
        sum = g.apply(CUDNN_POINTWISE_ADD, over_keys, sink_weight);
    } else {
        g.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum);
    }
    g.pointwise(CUDNN_POINTWISE_ADD, max, g.apply(CUDNN_POINTWISE_LOG, sum), {}, in.lse());
    const Tensor probabilities = g.apply(CUDNN_POINTWISE_DIV, weights, sum, CUDNN_DATA_BFLOAT16);
    g.matmul(probabilities, v, in.rows(operand_o, s.heads, s.seq_q, s.v_dim, s.o_batch));
}

namespace {

// A gradient of keys or values: weights^T times rows of all query heads, summed over those that share a key head.
void key_grad(const Operands& in, const Tensor& weights, const Tensor& rows, std::int64_t width, const Tensor& grad) {
    const AttentionPlanShape& s = in.s;
    CudnnGraph& g = in.graph;
    const std::int64_t all = s.heads * s.seq_q * s.seq_k;
    const Tensor turned =
        g.inner_as(CUDNN_DATA_BFLOAT16, {s.batch, s.heads, s.seq_k, s.seq_q}, {all, s.seq_q * s.seq_k, 1, s.seq_k});
    g.view(weights, turned);
    if (s.heads == s.kv_heads) return g.matmul(turned, rows, grad);
    const Tensor of_each_head = g.inner(CUDNN_DATA_BFLOAT16, {s.batch, s.heads, s.seq_k, width});
    g.matmul(turned, rows, of_each_head);
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, of_each_head, grad);
}

} // namespace

void describe_attention_grad(CudnnGraph& g, const AttentionPlanShape& s) {
    const Operands in{g, s};
    const Tensor q = in.rows(operand_q, s.heads, s.seq_q, s.qk_dim, s.q_batch);
    const Tensor k = in.turned(operand_k, s.kv_heads, s.seq_k, s.qk_dim, s.k_batch);
    const Tensor v = in.turned(operand_v, s.kv_heads, s.seq_k, s.v_dim, s.v_batch);
    const Tensor o = in.rows(operand_o, s.heads, s.seq_q, s.v_dim, s.o_batch);
    const Tensor dout = in.rows(operand_dout, s.heads, s.seq_q, s.v_dim, s.o_batch);
    const Tensor dq = in.rows(operand_dq, s.heads, s.seq_q, s.qk_dim, s.dq_batch);
    const Tensor dk = in.key_grad(operand_dk, s.qk_dim, s.k_batch);
    const Tensor dv = in.key_grad(operand_dv, s.v_dim, s.v_batch);

    const Tensor along_parts = in.inner(s.seq_q, 1);
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, g.apply(CUDNN_POINTWISE_MUL, dout, o), along_parts);
    const Tensor along =
        g.operand(operand_along, CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq_q, 1}, {s.heads * s.seq_q, s.seq_q, 1, 1});
    g.pointwise(CUDNN_POINTWISE_MUL, along_parts, g.scalar(1.0f), {}, along); // The 1 stands for dropout's scale.

    const Tensor product = in.inner(s.seq_q, s.seq_k);
    g.matmul(q, k, product);
    const Tensor scale = g.scalar(s.scale);
    const Tensor scores = g.apply(CUDNN_POINTWISE_MUL, product, scale);
    const Tensor weights = g.apply(CUDNN_POINTWISE_EXP, masked(g, s, g.apply(CUDNN_POINTWISE_SUB, scores, in.lse())));
    key_grad(in, weights, dout, s.v_dim, dv);

    const Tensor dweights = in.inner(s.seq_q, s.seq_k);
    g.matmul(dout, v, dweights);
    const Tensor centred = g.apply(CUDNN_POINTWISE_SUB, dweights, along);
    const Tensor dscores = g.apply(CUDNN_POINTWISE_MUL, g.apply(CUDNN_POINTWISE_MUL, centred, weights), scale);
    key_grad(in, dscores, q, s.qk_dim, dk);

    const Tensor keys = g.inner_as(CUDNN_DATA_BFLOAT16, {s.batch, s.kv_heads, s.seq_k, s.qk_dim},
                                   {s.k_batch, s.qk_dim, s.interleaved * s.k_batch, 1});
    g.view(k, keys);
    if (s.deterministic) return g.matmul(dscores, keys, dq);
    const Tensor sums = g.operand(operand_dq_sums, CUDNN_DATA_FLOAT, {s.batch, s.heads, s.seq_q, s.qk_dim},
                                  {s.heads * s.seq_q * s.qk_dim, s.seq_q * s.qk_dim, s.qk_dim, 1});
    g.matmul(dscores, keys, sums);
    g.pointwise(CUDNN_POINTWISE_IDENTITY, sums, {}, {}, dq);
}

} // namespace moe::cuda
