// The attention core under context parallelism: heads traded for tokens, keys and values round a ring, or both.
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/plan/mesh.hpp"

#include <array>

namespace moe::layers {

void exchange_heads(emit::Builder& b, plan::Group group, program::TensorId x, program::TensorId y, bool to_heads,
                    HeadPieces pieces) {
    if (pieces[0] == 0) pieces[0] = to_heads ? b.at(x).cols : b.at(y).cols;
    b.communicate(
        program::OpKind::all_to_all, group, program::Stream::tensor, {x}, {y},
        program::AllToAllAttr{to_heads, plan::group_size(b.plan(), group), b.at(x).rows, b.at(x).cols, pieces});
}

namespace {

// The ranks that trade heads for tokens, so that each has those tokens and 1 / trading of the heads.
int trading(const emit::Builder& b) { return plan::context_inner(b.plan()); }

plan::Group trading_group(const emit::Builder& b) {
    return b.plan().cp_comm == plan::ContextComm::hierarchical ? emit::groups::context_inner : emit::groups::context;
}

// The ranks whose keys and values go round.
int ring_steps(const emit::Builder& b) { return b.plan().cp / trading(b); }

double core_flops(const program::AttentionAttr& a, bool backward) {
    // Two matrix products forward (QK, PV); five backward (QK again, dV, dP, dQ, dK).
    const double pairs = static_cast<double>(a.batch) * a.heads * static_cast<double>(a.seq_q) *
                         static_cast<double>(a.seq_k) * a.visible;
    return 2.0 * pairs * (backward ? 3.0 * a.qk_dim + 2.0 * a.v_dim : 1.0 * a.qk_dim + a.v_dim);
}

bool by_heads(const emit::Builder& b) { return trading(b) > 1; }

program::TensorId like(emit::Builder& b, program::TensorId x, const std::string& name) {
    return b.activation(name, b.at(x).rows, b.at(x).cols);
}

// [T, W] -> [n T, W/n] among the n ranks that trade heads, and back; the identity where none do.
program::TensorId to_heads(emit::Builder& b, program::TensorId x, const std::string& name,
                           const HeadPieces& pieces = {}) {
    if (!by_heads(b)) return x;
    const int n = trading(b);
    const program::TensorId y = b.tensor(name + ".heads", b.at(x).dtype, b.at(x).rows * n, b.at(x).cols / n);
    exchange_heads(b, trading_group(b), x, y, true, pieces);
    return y;
}
program::TensorId to_tokens(emit::Builder& b, program::TensorId x, const std::string& name) {
    if (!by_heads(b)) return x;
    const int n = trading(b);
    const program::TensorId y = b.tensor(name, b.at(x).dtype, b.at(x).rows / n, b.at(x).cols * n);
    exchange_heads(b, trading_group(b), x, y, false);
    return y;
}

std::int64_t key_columns(const program::AttentionAttr& a) { return static_cast<std::int64_t>(a.kv_heads) * a.qk_dim; }
std::int64_t value_columns(const program::AttentionAttr& a) { return static_cast<std::int64_t>(a.kv_heads) * a.v_dim; }

// Queries, keys and values as they lie in a packed row.
HeadPieces packed_pieces(const program::AttentionAttr& a) {
    return {static_cast<std::int64_t>(a.heads) * a.qk_dim, key_columns(a), value_columns(a)};
}

// A step of the ring: keys and values side by side, as they travel.
program::AttentionAttr ring_step(program::AttentionAttr a, int ring, int step, bool merge) {
    a.ring = ring, a.step = step, a.merge = merge;
    if (step == 0) return a; // The first step reads keys where they were computed.
    a.k_stride = a.v_stride = key_columns(a) + value_columns(a);
    a.k_offset = 0;
    a.v_offset = key_columns(a);
    return a;
}

// Where the document of each query begins, or its chunk, is the operand behind all others.
void add_documents(const emit::Builder& b, const program::AttentionAttr& attr, std::size_t operands,
                   program::Operands& in) {
    if (!attr.documents) return;
    in.resize(operands, program::no_tensor);
    in.push_back(attr.chunk > 0 ? b.program().io.chunk_starts : b.program().io.document_starts);
}

void columns(emit::Builder& b, program::TensorId x, program::TensorId y, const program::ColumnsAttr& attr) {
    const double share = static_cast<double>(attr.cols);
    b.emit(program::OpKind::copy_columns, {x}, {y}, attr).bytes =
        share * (b.at(x).expected_bytes() / static_cast<double>(b.at(x).cols) +
                 (attr.accumulate ? 2.0 : 1.0) * b.at(y).expected_bytes() / static_cast<double>(b.at(y).cols));
}

program::TensorId next_of_ring(emit::Builder& b, program::TensorId x, const std::string& name) {
    const program::TensorId y = b.tensor(name, b.at(x).dtype, b.at(x).rows, b.at(x).cols);
    const plan::Group group = by_heads(b) ? emit::groups::context_outer : emit::groups::context;
    b.communicate(program::OpKind::ring_exchange, group, program::Stream::tensor, {x}, {y});
    return y;
}

} // namespace

// Keys and values side by side, as the ring takes them: [S/cp, kv heads * (qk + v)].
program::TensorId AttentionLayer::travelling(emit::Builder& b) const {
    const program::TensorId kv =
        b.tensor("kv_ring0", b.at(k_).dtype, b.at(k_).rows, key_columns(attr_) + value_columns(attr_));
    if (k_ == v_) { // Keys and values are neighbours in the packed row.
        columns(b, k_, kv, {b.at(kv).cols, attr_.k_offset, 0, false});
    } else {
        columns(b, k_, kv, {key_columns(attr_), attr_.k_offset, 0, false});
        columns(b, v_, kv, {value_columns(attr_), attr_.v_offset, key_columns(attr_), false});
    }
    return kv;
}

// The core of generation: keys and values stay in caches that are this layer's own from call to call.
program::TensorId AttentionLayer::attend_cached(emit::Builder& b, program::TensorId q, program::TensorId k,
                                                program::TensorId v, program::AttentionAttr attr,
                                                program::TensorId sinks) const {
    attr.seq_k = b.cached_keys;
    const auto cache = [&](const char* name, std::int64_t columns) {
        return emit::add_flat(b.program(), fmt::format("layer{}.{}_cache", layer_, name), b.activation_dtype(),
                              program::Storage::optimizer, b.cached_keys * columns, b.chunk());
    };
    const program::TensorId keys = cache("key", key_columns(attr)), values = cache("value", value_columns(attr));
    const program::TensorId o = b.activation("attn_out", b.at(q).rows, std::int64_t{attr.heads} * attr.v_dim);
    program::Operands in{q, k, v, b.program().io.positions};
    if (sinks != program::no_tensor) in.push_back(sinks);
    b.emit(program::OpKind::attention_cached, std::move(in), {o, keys, values}, attr).flops = core_flops(attr, false);
    return o;
}

// The attention core; over a ring of CP the keys and values travel round a ring and every step sees half of its square
// (zigzag). The online softmax carries output and log-sum-exp from step to step (arXiv 2310.01889).
program::TensorId AttentionLayer::attend(emit::Builder& b, program::TensorId q, program::TensorId k,
                                         program::TensorId v, program::AttentionAttr attr, program::TensorId sinks) {
    b.module = program::Module::core_attn;
    if (b.cached_keys > 0) return attend_cached(b, q, k, v, attr, sinks);
    attr_ = attr;
    attr_.deterministic = b.plan().deterministic;
    attr_.documents = b.plan().masks_documents() || attr.chunk > 0;
    if (const model::DocumentLengths lengths = b.plan().masked_lengths(); !lengths.bins.empty())
        attr_.visible = model::keys_seen(a_, b.plan().seq, &lengths) / static_cast<double>(b.plan().seq);
    const program::TensorId rotated = q; // Packed queries, keys and values are quantized once.
    const HeadPieces pieces = k == rotated ? packed_pieces(attr) : HeadPieces{};
    const auto operand = [&](program::TensorId x, const char* name) {
        return to_heads(b, low(b, x, name), name, pieces);
    };
    q_ = operand(q, "attn_q");
    k_ = k == rotated ? q_ : operand(k, "attn_k");
    v_ = v == rotated ? q_ : operand(v, "attn_v");
    if (by_heads(b)) {
        const int n = trading(b);
        attr_.seq_q = attr_.seq_k = b.plan().seq / ring_steps(b);
        attr_.heads /= n, attr_.kv_heads /= n;
        for (std::int64_t* of :
             {&attr_.q_stride, &attr_.k_stride, &attr_.v_stride, &attr_.q_offset, &attr_.k_offset, &attr_.v_offset})
            *of /= n;
    }
    attr = attr_;
    o_ = b.activation("attn_out", b.at(q_).rows, static_cast<std::int64_t>(attr.heads) * attr.v_dim);
    lse_ = b.tensor("attn_lse", program::Dtype::f32, b.at(q_).rows, attr.heads);
    const int steps = ring_steps(b);
    program::TensorId kv = steps > 1 ? travelling(b) : program::no_tensor;
    for (int step = 0; step < steps; ++step) {
        const program::TensorId next =
            step + 1 < steps ? next_of_ring(b, kv, fmt::format("kv_ring{}", step + 1)) : program::no_tensor;
        program::Operands in{q_, step == 0 ? k_ : kv, step == 0 ? v_ : kv};
        if (step > 0)
            in.append({program::no_tensor, o_, lse_}); // Sinks join the sum once.
        else if (sinks != program::no_tensor)
            in.push_back(sinks);
        add_documents(b, attr_, 6, in);
        program::Op& op =
            b.emit(program::OpKind::attention, std::move(in), {o_, lse_}, ring_step(attr, steps, step, step > 0));
        op.flops = core_flops(attr, false);
        kv = next;
    }
    return to_tokens(b, o_, "attn_out_tokens");
}

// The steps with other members' keys and values: dq is summed here, gradients of keys and values follow them one step
// behind and come home last. A step's own part is added to what arrives, so that its arrival runs under the product.
program::TensorId AttentionLayer::ring_backward(emit::Builder& b, program::TensorId doutput, program::TensorId dq) {
    const int steps = ring_steps(b);
    program::TensorId kv = next_of_ring(b, travelling(b), "kv_ring1"), arrived = program::no_tensor;
    for (int step = 1; step < steps; ++step) {
        const program::TensorId next =
            step + 1 < steps ? next_of_ring(b, kv, fmt::format("kv_ring{}", step + 1)) : program::no_tensor;
        program::TensorId dkv = b.activation("dkv", b.at(kv).rows, b.at(kv).cols);
        program::Operands in{doutput, q_, kv, kv, o_, lse_};
        if (step > 1) in.append({program::no_tensor, dq});
        add_documents(b, attr_, 8, in);
        b.emit(program::OpKind::attention_grad, std::move(in), {dq, dkv, dkv}, ring_step(attr_, steps, step, step > 1))
            .flops = core_flops(attr_, true);
        if (arrived != program::no_tensor) dkv = b.add(arrived, dkv, "dkv_sum");
        arrived = next_of_ring(b, dkv, fmt::format("dkv_ring{}", step + 1));
        kv = next;
    }
    return arrived;
}

void AttentionLayer::attend_backward(emit::Builder& b, program::TensorId doutput, program::TensorId dq,
                                     program::TensorId dk, program::TensorId dv) {
    b.module = program::Module::core_attn;
    doutput = to_heads(b, low(b, doutput, "attn_dout"), "attn_dout");
    const program::TensorId packed = dq == dk ? dq : program::no_tensor;
    const program::TensorId outside[] = {dq, dk, dv};
    if (by_heads(b)) { // The gradients are of this rank's heads, sent back below.
        dq = like(b, q_, "attn_dq");
        dk = packed != program::no_tensor ? dq : like(b, k_, "attn_dk");
        dv = packed != program::no_tensor ? dq : like(b, v_, "attn_dv");
    }
    const int steps = ring_steps(b);
    const program::TensorId arrived = steps > 1 ? ring_backward(b, doutput, dq) : program::no_tensor;
    program::Operands in{doutput, q_, k_, v_, o_, lse_}, out{dq, dk, dv};
    if (a_.sinks || steps > 1) in.push_back(a_.sinks ? sinks_.value : program::no_tensor);
    if (steps > 1) in.push_back(dq);
    add_documents(b, attr_, 8, in);
    if (a_.sinks) out.push_back(sinks_.gradient);
    b.emit(program::OpKind::attention_grad, std::move(in), std::move(out), ring_step(attr_, steps, 0, steps > 1))
        .flops = core_flops(attr_, true);
    if (steps > 1) {
        const std::int64_t k = key_columns(attr_), v = value_columns(attr_);
        if (packed != program::no_tensor) {
            columns(b, arrived, dk, {k + v, 0, attr_.k_offset, true});
        } else {
            columns(b, arrived, dk, {k, 0, attr_.k_offset, true});
            columns(b, arrived, dv, {v, k, attr_.v_offset, true});
        }
    }
    if (!by_heads(b)) return;
    if (packed != program::no_tensor) {
        program::AttentionAttr whole = attr_;
        whole.heads *= trading(b), whole.kv_heads *= trading(b);
        return exchange_heads(b, trading_group(b), dq, outside[0], false, packed_pieces(whole));
    }
    exchange_heads(b, trading_group(b), dq, outside[0], false);
    exchange_heads(b, trading_group(b), dk, outside[1], false);
    exchange_heads(b, trading_group(b), dv, outside[2], false);
}

} // namespace moe::layers
