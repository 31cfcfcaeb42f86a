// Demand-driven repetition of forward ops in the backward template.
#include "planner/lower/passes/recompute.hpp"

#include "planner/plan/choices.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe::passes {

bool recomputes(unsigned set, const program::Op& op) {
    if (op.layer < 0 || op.phase != program::Phase::forward) return false;
    if (op.kind == program::OpKind::pick_keys && std::get<program::AttentionAttr>(op.attr).kept) return false;
    if (set & plan::recompute::full) return true;
    const program::NormAttr* norm = std::get_if<program::NormAttr>(&op.attr);
    switch (norm != nullptr && op.module == program::Module::layernorm ? norm->within : op.module) {
    case program::Module::layernorm:
        return set & plan::recompute::layernorm;
    case program::Module::core_attn:
        return set & plan::recompute::core_attn;
    case program::Module::mla_up_proj:
        return set & plan::recompute::mla_up_proj;
    case program::Module::mlp:
    case program::Module::moe_act_dense:
        return set & plan::recompute::mlp;
    case program::Module::moe_act:
        return set & (plan::recompute::moe_act | plan::recompute::moe);
    case program::Module::shared_experts:
        return set & (plan::recompute::shared_experts | plan::recompute::moe);
    case program::Module::router:
    case program::Module::dispatch:
    case program::Module::experts:
    case program::Module::combine:
        return set & plan::recompute::moe;
    default:
        return false;
    }
}

namespace {

class Repeater {
public:
    Repeater(program::Program& program, const program::Template& forward, unsigned set, bool keeps_core)
        : program_(program), forward_(forward), keeps_core_(keeps_core && (set & plan::recompute::full) == 0) {
        for (std::size_t i = 0; i < forward.ops.size(); ++i)
            if (recomputes(set, forward.ops[i]) || quantizes_repeated(forward.ops[i]))
                for (program::TensorId id : forward.ops[i].out)
                    if (id != program::no_tensor &&
                        program.tensors[static_cast<std::size_t>(id)].storage == program::Storage::activation)
                        producers_[id].push_back(i);
    }

    // Returns `op` with operands replaced that have to be recomputed; the repeated ops are appended to `out` first.
    program::Op rewrite(program::Op op, std::vector<program::Op>& out) {
        for (program::TensorId& id : op.in) id = demand(id, op, out);
        return op;
    }

private:
    // A linear layer whose input is computed again keeps no quantized copy of it either, or nothing would be saved
    // (arXiv 2603.07685 section 4.1.4).
    bool quantizes_repeated(const program::Op& op) const {
        if (op.kind != program::OpKind::quantize || op.layer < 0) return false;
        const auto found = producers_.find(op.in.front());
        if (found == producers_.end()) return false;
        const program::Op& producer = forward_.ops[found->second.front()];
        const bool kept =
            keeps_core_ && producer.module == program::Module::core_attn && op.module != program::Module::core_attn;
        return producer.layer == op.layer && !kept;
    }

    program::TensorId demand(program::TensorId id, const program::Op& reader, std::vector<program::Op>& out) {
        const auto found = producers_.find(id);
        if (id == program::no_tensor || found == producers_.end()) return id;
        const program::Op& producer = forward_.ops[found->second.front()];
        if (producer.layer != reader.layer) return id;
        if (keeps_core_ && producer.module == program::Module::core_attn && reader.module != program::Module::core_attn)
            return id;
        const auto done = renamed_.find(id);
        if (done != renamed_.end()) return done->second;
        // A ring writes its output once per step: all its writers are repeated, in order.
        for (std::size_t index : found->second) repeat(index, out);
        return renamed_.at(id);
    }

    void repeat(std::size_t index, std::vector<program::Op>& out) {
        program::Op op = rewrite(forward_.ops[index], out);
        op.phase = program::Phase::recompute;
        for (program::TensorId& id : op.out) {
            if (id == program::no_tensor) continue;
            const auto known = renamed_.find(id);
            if (known != renamed_.end()) {
                id = known->second;
                continue;
            }
            const program::TensorId fresh = program::repeat_tensor(program_, id);
            renamed_.emplace(id, fresh);
            id = fresh;
        }
        out.push_back(std::move(op));
    }

    program::Program& program_;
    const program::Template& forward_;
    bool keeps_core_;
    std::unordered_map<program::TensorId, std::vector<std::size_t>> producers_;
    std::unordered_map<program::TensorId, program::TensorId> renamed_;
};

} // namespace

void recompute_pass(program::Program& program, const program::Template& forward, program::Template& backward,
                    unsigned set, bool keeps_core) {
    if (set == 0) return;
    Repeater repeater(program, forward, set, keeps_core);
    std::vector<program::Op> ops;
    ops.reserve(backward.ops.size() * 3 / 2);
    for (program::Op& op : backward.ops) {
        program::Op rewritten = repeater.rewrite(std::move(op), ops);
        ops.push_back(std::move(rewritten));
    }
    backward.ops = std::move(ops);
}

} // namespace moe::passes
