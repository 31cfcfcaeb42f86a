// Copies of saved activations to the host and back, found by what reads them in the forward.
#include "planner/lower/passes/offload.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace moe {

namespace {

struct Offloaded {
    unsigned scope = 0;
    std::size_t last_reader = 0;                                       // in forward
    int layer = -1;                                                    // whose backward reads it
    TensorId leaving = no_tensor, again = no_tensor, home = no_tensor; // home: on the host
};

// Which module's input an operand is. A layer has two norms, the second before its MLP or experts, and two grouped
// products, the first of which is FC1.
class Scopes {
public:
    // Calls visit(tensor, scope) for what `op` reads as a module's input; ops come in order.
    template <class Visit>
    void visit(const Op& op, Visit visit) {
        if (op.layer != layer_) layer_ = op.layer, norms_ = 0, grouped_ = 0;
        if (op.layer < 0) return;
        switch (op.kind) {
        case OpKind::rmsnorm:
            if (op.module == Module::layernorm) visit(op.in[0], norms_++ == 0 ? offload::attn_norm : offload::mlp_norm);
            return;
        case OpKind::all_gather: // what is saved is this rank's part, which TP gathers for the product
            if (op.module == Module::attn_in) visit(op.in[0], offload::qkv_linear);
            return;
        case OpKind::gemm:
            if (op.module == Module::attn_in) visit(op.in[0], offload::qkv_linear);
            if (op.module == Module::attn_out) visit(op.in[0], offload::attn_proj);
            return;
        case OpKind::quantize:       // a product saves its column-wise copy
            if (op.out.size() < 2) { // the row-wise one, which it also reads
                if (op.module == Module::attn_out) visit(op.in[0], offload::attn_proj);
                return;
            }
            if (op.module == Module::attn_in) visit(op.out[1], offload::qkv_linear);
            if (op.module == Module::experts) visit(op.out[1], offload::expert_fc1);
            return;
        case OpKind::attention:
            for (std::size_t i = 0; i < 3; ++i) visit(op.in[i], offload::core_attn);
            return;
        case OpKind::grouped_gemm:
            if (grouped_++ == 0) visit(op.in[0], offload::expert_fc1);
            return;
        case OpKind::activation:
            if (op.module == Module::moe_act) visit(op.in[0], offload::moe_act);
            return;
        default:
            return;
        }
    }

private:
    int layer_ = -1, norms_ = 0, grouped_ = 0;
};

bool reads(const Op& op, TensorId id) { return std::find(op.in.begin(), op.in.end(), id) != op.in.end(); }

// What leaves the device: read by a chosen module in the forward, large enough, and read again in the backward.
std::map<TensorId, Offloaded> find_offloaded(const Program& program, const Template& forward, const Template& backward,
                                             unsigned set, std::int64_t smallest) {
    std::map<TensorId, Offloaded> found;
    Scopes scopes;
    for (const Op& op : forward.ops)
        scopes.visit(op, [&](TensorId id, unsigned scope) {
            if (id == no_tensor || (scope & set) == 0) return;
            const Tensor& t = program.tensors[static_cast<std::size_t>(id)];
            if (t.storage == Storage::activation && t.base == no_tensor && t.elements() >= smallest)
                found.try_emplace(id).first->second.scope |= scope;
        });
    for (auto it = found.begin(); it != found.end();) {
        const auto reader =
            std::find_if(backward.ops.begin(), backward.ops.end(), [&](const Op& op) { return reads(op, it->first); });
        if (reader == backward.ops.end() || reader->layer < 0) {
            it = found.erase(it);
            continue;
        }
        it->second.layer = reader->layer;
        ++it;
    }
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        const auto touch = [&](TensorId id) {
            const auto at = found.find(id);
            if (at != found.end()) at->second.last_reader = i;
        };
        for (const TensorId id : forward.ops[i].in) touch(id);
        for (const TensorId id : forward.ops[i].out) touch(id); // quantized copies have no reader
    }
    return found;
}

TensorId add_buffer(Program& program, TensorId like, const char* suffix) {
    Tensor buffer = program.tensors[static_cast<std::size_t>(like)];
    buffer.name += suffix;
    buffer.chunk = -1; // one for all micro-batches
    program.tensors.push_back(std::move(buffer));
    return static_cast<TensorId>(program.tensors.size()) - 1;
}

// Where a tensor waits on the host, one for every micro-batch in flight.
TensorId add_home(Program& program, TensorId of) {
    Tensor home = program.tensors[static_cast<std::size_t>(of)];
    home.name += ".on_host";
    home.storage = Storage::host;
    program.tensors.push_back(std::move(home));
    return static_cast<TensorId>(program.tensors.size()) - 1;
}

// Tensors of one shape that take the same place in their layers leave from one buffer and come back into another.
void share_buffers(Program& program, const Template& forward, std::map<TensorId, Offloaded>& offloaded) {
    using Kind = std::tuple<unsigned, Dtype, std::int64_t, std::int64_t, int>;
    std::map<std::pair<int, Kind>, int> of_layer;
    std::map<Kind, std::pair<TensorId, TensorId>> buffers;
    for (auto& [id, o] : offloaded) {
        const Tensor source = program.tensors[static_cast<std::size_t>(id)];
        Kind kind{o.scope, source.dtype, source.rows, source.cols, 0};
        std::get<int>(kind) = of_layer[{o.layer, kind}]++;
        const auto [at, fresh] = buffers.try_emplace(kind, no_tensor, no_tensor);
        if (fresh) at->second = {add_buffer(program, id, ".to_host"), add_buffer(program, id, ".from_host")};
        o.again = at->second.second;
        o.home = add_home(program, id);
        // What a stage receives keeps a place of its own, so that messages need not wait for copies.
        const auto writer = std::find_if(forward.ops.begin(), forward.ops.end(), [id = id](const Op& op) {
            return std::find(op.out.begin(), op.out.end(), id) != op.out.end();
        });
        o.leaving = writer == forward.ops.end() || writer->layer < 0 ? id : at->second.first;
    }
}

Op copy(const Program& program, OpKind kind, const Op& beside, TensorId from, TensorId to, int layer, bool planned) {
    Op op;
    op.kind = kind;
    op.stream = Stream::host;
    op.module = beside.module;
    op.phase = beside.phase;
    op.layer = static_cast<std::int16_t>(layer);
    op.in = {from};
    op.out = {to};
    const Tensor& tensor = program.tensors[static_cast<std::size_t>(from)];
    op.bytes = planned ? static_cast<double>(tensor.bytes()) : tensor.expected_bytes();
    op.attr = CopyAttr{tensor.elements()};
    return op;
}

} // namespace

void offload_pass(Program& program, Template& forward, Template& backward, unsigned set, const OffloadRules& rules) {
    std::map<TensorId, Offloaded> offloaded =
        find_offloaded(program, forward, backward, set & ~offload::optimizer, rules.smallest);
    if (offloaded.empty()) return;
    share_buffers(program, forward, offloaded);
    std::vector<Op> ops;
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        for (std::vector<TensorId>* ids : {&forward.ops[i].in, &forward.ops[i].out})
            for (TensorId& id : *ids) {
                const auto at = offloaded.find(id);
                if (at != offloaded.end()) id = at->second.leaving;
            }
        ops.push_back(std::move(forward.ops[i]));
        for (const auto& [id, o] : offloaded)
            if (o.last_reader == i)
                ops.push_back(copy(program, OpKind::copy_to_host, ops.back(), o.leaving, o.home, ops.back().layer,
                                   rules.planned_rows));
    }
    forward.ops = std::move(ops);

    ops.clear();
    int layer = -1;
    for (Op& op : backward.ops) {
        if (op.layer != layer && op.layer >= 0) {
            layer = op.layer;
            for (const auto& [id, o] : offloaded)
                if (o.layer == layer)
                    ops.push_back(
                        copy(program, OpKind::copy_from_host, op, o.home, o.again, layer, rules.planned_rows));
        }
        for (TensorId& id : op.in) {
            const auto at = offloaded.find(id);
            if (at != offloaded.end() && op.layer == at->second.layer) id = at->second.again;
        }
        ops.push_back(std::move(op));
    }
    backward.ops = std::move(ops);
}

} // namespace moe
