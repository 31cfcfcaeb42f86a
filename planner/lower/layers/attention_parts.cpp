// What grouped-query attention does beside its products and its core: biases, norms of heads, gates of the output.
#include "planner/lower/layers/layers.hpp"

namespace moe::layers {

namespace {

// Copies some columns, bytes of these alone.
void copy_part(emit::Builder& b, program::TensorId x, program::TensorId y, const program::ColumnsAttr& attr) {
    const program::Tensor& from = b.at(x);
    b.emit(program::OpKind::copy_columns, {x}, {y}, attr).bytes =
        2.0 * from.expected_bytes() * static_cast<double>(attr.cols) / static_cast<double>(from.cols);
}

} // namespace

// The bias of a packed row. Where keys and values have several ranks, their part lies in another bucket and comes
// beside that of queries.
emit::Weight AttentionLayer::qkv_bias(emit::Builder& b, std::int64_t columns) {
    const std::string key = key_ + ".qkv_bias", other = key + emit::ParameterSet::beside;
    const std::int64_t of_keys = b.parameters().elements(other), of_queries = columns - of_keys;
    if (of_keys == 0) return b.weight(key, columns, 1);
    const emit::Weight queries = b.weight(key, 1, of_queries);
    keys_bias_ = b.weight(other, 1, of_keys);
    const emit::Weight joined{b.tensor("qkv_bias_joined", b.at(queries.value).dtype, 1, columns), queries.gradient,
                              of_queries, 1};
    copy_part(b, queries.value, joined.value, {of_queries, 0, 0, false});
    copy_part(b, keys_bias_.value, joined.value, {of_keys, 0, of_queries, false});
    return joined;
}

void AttentionLayer::qkv_bias_backward(emit::Builder& b, program::TensorId dqkv) {
    b.phase = program::Phase::wgrad;
    if (keys_bias_.value == program::no_tensor) {
        b.emit(program::OpKind::bias_grad, {dqkv}, {qkv_bias_.gradient});
    } else {
        std::int64_t from = 0;
        for (const auto& [gradient, columns] :
             {std::pair{qkv_bias_.gradient, qkv_bias_.n}, std::pair{keys_bias_.gradient, keys_bias_.k}}) {
            const program::TensorId part = b.activation("dqkv_part", b.at(dqkv).rows, columns);
            copy_part(b, dqkv, part, {columns, from, 0, false});
            b.emit(program::OpKind::bias_grad, {part}, {gradient});
            from += columns;
        }
    }
    b.phase = program::Phase::dgrad;
}

// The norms of queries and of keys over the heads of all TP ranks, which add up their squares.
program::TensorId AttentionLayer::norm_heads(emit::Builder& b, program::TensorId qkv) {
    const int tp = b.plan().tp;
    const std::int64_t tokens = b.gathered_tokens();
    heads_in_ = qkv;
    const std::int64_t keys = std::int64_t{a_.key_heads_of(tp)} * a_.qk_dim;
    heads_attr_ = {tokens,
                   a_.q_norm() / tp,
                   keys,
                   a_.q_norm(),
                   a_.k_norm(),
                   model_.norm_eps,
                   1.0 * a_.k_norm() / static_cast<double>(keys * tp)};
    q_head_norm_ = b.weight(key_ + ".q_norm", heads_attr_.queries, 1);
    k_head_norm_ = b.weight(key_ + ".k_norm", heads_attr_.keys, 1);
    squares_ = b.tensor("qk_squares", program::Dtype::f32, tokens, 2);
    b.emit(program::OpKind::heads_squares, {qkv}, {squares_}, heads_attr_);
    squares_ = b.sum_over_tp(squares_, "qk_squares_sum");
    const program::TensorId normed = b.activation("qkv_normed", tokens, b.at(qkv).cols);
    b.emit(program::OpKind::heads_norm, {qkv, squares_, q_head_norm_.value, k_head_norm_.value}, {normed}, heads_attr_);
    return normed;
}

program::TensorId AttentionLayer::norm_heads_backward(emit::Builder& b, program::TensorId dnormed) {
    const program::Tensor shape = b.at(dnormed);
    program::TensorId along = b.tensor("qk_along", program::Dtype::f32, shape.rows, 2);
    b.emit(program::OpKind::heads_along, {dnormed, heads_in_, q_head_norm_.value, k_head_norm_.value}, {along},
           heads_attr_);
    along = b.sum_over_tp(along, "qk_along_sum");
    const program::TensorId dqkv = b.activation("dqkv_norm", shape.rows, shape.cols);
    b.emit(program::OpKind::heads_norm_grad,
           {dnormed, heads_in_, squares_, along, q_head_norm_.value, k_head_norm_.value},
           {dqkv, q_head_norm_.gradient, k_head_norm_.gradient}, heads_attr_);
    return dqkv;
}

// The output times its gates, one for each head or for each column.
program::TensorId AttentionLayer::gate(emit::Builder& b, program::TensorId output) {
    b.module = program::Module::core_attn;
    ungated_ = output;
    const program::TensorId out = b.activation("attn_gated", b.at(output).rows, b.at(output).cols);
    b.emit(program::OpKind::sigmoid_scale, {output, gates_}, {out}, program::GateAttr{a_.softplus_gate});
    return out;
}

program::TensorId AttentionLayer::gate_backward(emit::Builder& b, program::TensorId dgated) {
    b.module = program::Module::core_attn;
    const program::TensorId doutput = b.activation("dattn_gated", b.at(dgated).rows, b.at(dgated).cols);
    dgates_ = b.activation("dattn_gates", b.at(gates_).rows, b.at(gates_).cols);
    b.emit(program::OpKind::sigmoid_scale_grad, {dgated, ungated_, gates_}, {doutput, dgates_},
           program::GateAttr{a_.softplus_gate});
    return doutput;
}

} // namespace moe::layers
