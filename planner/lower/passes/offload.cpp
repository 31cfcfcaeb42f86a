// Copies of saved activations to the host and back, found by what reads them in the forward.
#include "planner/lower/passes/offload.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace moe::passes {

namespace {

struct Offloaded {
    unsigned scope = 0;
    std::size_t last_reader = 0; // number of the last op in forward that reads it
    int layer = -1;              // layer whose backward reads it
    program::TensorId source = program::no_tensor, again = program::no_tensor,
                      home = program::no_tensor; // home: tensor on the host
};

// The module whose input an operand is. A layer has two norms, the second before its MLP or experts, and two grouped
// products, the first of which is FC1.
class Scopes {
public:
    // Calls visit(tensor, scope) for what `op` reads as a module's input; ops come in order.
    template <class Visit>
    void visit(const program::Op& op, Visit visit) {
        if (op.layer != layer_) layer_ = op.layer, norms_ = 0, grouped_ = 0;
        if (op.layer < 0) return;
        switch (op.kind) {
        case program::OpKind::rmsnorm:
            if (op.module == program::Module::layernorm)
                visit(op.in[0], norms_++ == 0 ? plan::offload::attn_norm : plan::offload::mlp_norm);
            return;
        case program::OpKind::all_gather: // This rank's part is saved, which TP gathers for the product.
            if (op.module == program::Module::attn_in) visit(op.in[0], plan::offload::qkv_linear);
            return;
        case program::OpKind::gemm:
            if (op.module == program::Module::attn_in) visit(op.in[0], plan::offload::qkv_linear);
            if (op.module == program::Module::attn_out) visit(op.in[0], plan::offload::attn_proj);
            return;
        case program::OpKind::quantize: // A product saves its column-wise copy.
            if (op.out.size() < 2) {    // The only output is row-wise, and the product reads it too.
                if (op.module == program::Module::attn_out) visit(op.in[0], plan::offload::attn_proj);
                return;
            }
            if (op.module == program::Module::attn_in) visit(op.out[1], plan::offload::qkv_linear);
            if (op.module == program::Module::experts) visit(op.out[1], plan::offload::expert_fc1);
            return;
        case program::OpKind::attention:
            for (std::size_t i = 0; i < 3; ++i) visit(op.in[i], plan::offload::core_attn);
            return;
        case program::OpKind::delta_rule:
        case program::OpKind::ssd:
            visit(op.in[0], plan::offload::core_attn);
            return;
        case program::OpKind::grouped_gemm:
            if (grouped_++ == 0) visit(op.in[0], plan::offload::expert_fc1);
            return;
        case program::OpKind::activation:
            if (op.module == program::Module::moe_act) visit(op.in[0], plan::offload::moe_act);
            return;
        default:
            return;
        }
    }

private:
    int layer_ = -1, norms_ = 0, grouped_ = 0;
};

bool reads(const program::Op& op, program::TensorId id) {
    return std::find(op.in.begin(), op.in.end(), id) != op.in.end();
}

// The tensors that leave the device: read by a chosen module in the forward, large enough, and read again in the
// backward.
std::map<program::TensorId, Offloaded> find_offloaded(const program::Program& program, const program::Template& forward,
                                                      const program::Template& backward, unsigned set,
                                                      std::int64_t smallest) {
    std::map<program::TensorId, Offloaded> found;
    Scopes scopes;
    for (const program::Op& op : forward.ops)
        scopes.visit(op, [&](program::TensorId id, unsigned scope) {
            if (id == program::no_tensor || (scope & set) == 0) return;
            const program::Tensor& t = program.tensors[static_cast<std::size_t>(id)];
            if (t.storage == program::Storage::activation && t.base == program::no_tensor && t.elements() >= smallest)
                found.try_emplace(id).first->second.scope |= scope;
        });
    for (auto it = found.begin(); it != found.end();) {
        const auto reader = std::find_if(backward.ops.begin(), backward.ops.end(),
                                         [&](const program::Op& op) { return reads(op, it->first); });
        if (reader == backward.ops.end() || reader->layer < 0) {
            it = found.erase(it);
            continue;
        }
        it->second.layer = reader->layer;
        ++it;
    }
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        const auto touch = [&](program::TensorId id) {
            const auto at = found.find(id);
            if (at != found.end()) at->second.last_reader = i;
        };
        for (const program::TensorId id : forward.ops[i].in) touch(id);
        for (const program::TensorId id : forward.ops[i].out) touch(id); // Quantized copies have no reader.
    }
    return found;
}

program::TensorId add_buffer(program::Program& program, program::TensorId like, const char* suffix) {
    program::Tensor buffer = program.tensors[static_cast<std::size_t>(like)];
    buffer.name += suffix;
    buffer.chunk = -1; // One buffer serves all micro-batches.
    program.tensors.push_back(std::move(buffer));
    return static_cast<program::TensorId>(program.tensors.size()) - 1;
}

// Adds the place where a tensor waits on the host, one for every micro-batch in flight.
program::TensorId add_home(program::Program& program, program::TensorId of) {
    program::Tensor home = program.tensors[static_cast<std::size_t>(of)];
    home.name += ".on_host";
    home.storage = program::Storage::host;
    program.tensors.push_back(std::move(home));
    return static_cast<program::TensorId>(program.tensors.size()) - 1;
}

// Tensors of one shape that take the same place in their layers leave from one buffer and come back into another. Where
// a layer is one part, the op that reads its input last writes the next layer's: these two take turns.
void share_buffers(program::Program& program, const program::Template& forward,
                   std::map<program::TensorId, Offloaded>& offloaded) {
    using Kind = std::tuple<unsigned, program::Dtype, std::int64_t, std::int64_t, int>;
    std::map<std::pair<int, Kind>, int> of_layer;
    std::map<Kind, std::pair<program::TensorId, program::TensorId>> buffers;
    for (auto& [id, o] : offloaded) {
        const program::Tensor source = program.tensors[static_cast<std::size_t>(id)];
        Kind kind{o.scope, source.dtype, source.rows, source.cols, 0};
        std::get<int>(kind) = 2 * of_layer[{o.layer, kind}]++;
        const auto writer = std::find_if(forward.ops.begin(), forward.ops.end(), [id = id](const program::Op& op) {
            return std::find(op.out.begin(), op.out.end(), id) != op.out.end();
        });
        const auto first = buffers.find(kind);
        const auto leaves_from_it = [&](program::TensorId in) {
            const auto other = offloaded.find(in);
            return other != offloaded.end() && other->second.source == first->second.first;
        };
        if (writer != forward.ops.end() && first != buffers.end() &&
            std::any_of(writer->in.begin(), writer->in.end(), leaves_from_it))
            ++std::get<int>(kind);
        const auto [at, fresh] = buffers.try_emplace(kind, program::no_tensor, program::no_tensor);
        if (fresh) at->second = {add_buffer(program, id, ".to_host"), add_buffer(program, id, ".from_host")};
        o.again = at->second.second;
        o.home = add_home(program, id);
        // The tensor that a stage receives keeps a place of its own, so that messages need not wait for copies.
        o.source = writer == forward.ops.end() || writer->layer < 0 ? id : at->second.first;
    }
}

program::Op copy(const program::Program& program, program::OpKind kind, const program::Op& beside,
                 program::TensorId from, program::TensorId to, int layer, bool planned) {
    program::Op op;
    op.kind = kind;
    op.stream = program::Stream::host;
    op.module = beside.module;
    op.phase = beside.phase;
    op.layer = static_cast<std::int16_t>(layer);
    op.in = {from};
    op.out = {to};
    const program::Tensor& tensor = program.tensors[static_cast<std::size_t>(from)];
    op.bytes = planned ? static_cast<double>(tensor.bytes()) : tensor.expected_bytes();
    op.attr = program::CopyAttr{tensor.elements()};
    return op;
}

} // namespace

void offload_pass(program::Program& program, program::Template& forward, program::Template& backward, unsigned set,
                  const OffloadRules& rules) {
    std::map<program::TensorId, Offloaded> offloaded =
        find_offloaded(program, forward, backward, set & plan::offload::activations, rules.smallest);
    if (offloaded.empty()) return;
    share_buffers(program, forward, offloaded);
    std::vector<std::vector<const Offloaded*>> leaving(forward.ops.size()); // by their last reader
    std::map<int, std::vector<const Offloaded*>> coming;                    // by layer
    for (const auto& [id, o] : offloaded) {
        leaving[o.last_reader].push_back(&o);
        coming[o.layer].push_back(&o);
    }
    std::vector<program::Op> ops;
    ops.reserve(forward.ops.size() + offloaded.size());
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        for (program::Operands* ids : {&forward.ops[i].in, &forward.ops[i].out})
            for (program::TensorId& id : *ids) {
                const auto at = offloaded.find(id);
                if (at != offloaded.end()) id = at->second.source;
            }
        ops.push_back(std::move(forward.ops[i]));
        for (const Offloaded* o : leaving[i])
            ops.push_back(copy(program, program::OpKind::copy_to_host, ops.back(), o->source, o->home, ops.back().layer,
                               rules.planned_rows));
    }
    forward.ops = std::move(ops);

    ops = {};
    ops.reserve(backward.ops.size() + offloaded.size());
    int layer = -1;
    for (program::Op& op : backward.ops) {
        if (op.layer != layer && op.layer >= 0) {
            layer = op.layer;
            for (const Offloaded* o : coming[layer])
                ops.push_back(
                    copy(program, program::OpKind::copy_from_host, op, o->home, o->again, layer, rules.planned_rows));
        }
        for (program::TensorId& id : op.in) {
            const auto at = offloaded.find(id);
            if (at != offloaded.end() && op.layer == at->second.layer) id = at->second.again;
        }
        ops.push_back(std::move(op));
    }
    backward.ops = std::move(ops);
}

} // namespace moe::passes
