// Demand-driven repetition of forward ops in the backward template.
#include "planner/lower/passes/recompute.hpp"

#include "planner/plan/choices.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe {

bool recomputes(unsigned set, const Op& op) {
    if (op.layer < 0 || op.phase != Phase::forward) return false;
    if (op.kind == OpKind::pick_keys && std::get<AttentionAttr>(op.attr).kept) return false;
    if (set & recompute::full) return true;
    const NormAttr* norm = std::get_if<NormAttr>(&op.attr);
    switch (norm != nullptr && op.module == Module::layernorm ? norm->within : op.module) {
    case Module::layernorm:
        return set & recompute::layernorm;
    case Module::core_attn:
        return set & recompute::core_attn;
    case Module::mla_up_proj:
        return set & recompute::mla_up_proj;
    case Module::mlp:
    case Module::moe_act_dense:
        return set & recompute::mlp;
    case Module::moe_act:
        return set & (recompute::moe_act | recompute::moe);
    case Module::shared_experts:
        return set & (recompute::shared_experts | recompute::moe);
    case Module::router:
    case Module::dispatch:
    case Module::experts:
    case Module::combine:
        return set & recompute::moe;
    default:
        return false;
    }
}

namespace {

class Repeater {
public:
    Repeater(Program& program, const Template& forward, unsigned set, bool keeps_core)
        : program_(program), forward_(forward), keeps_core_(keeps_core && (set & recompute::full) == 0) {
        for (std::size_t i = 0; i < forward.ops.size(); ++i)
            if (recomputes(set, forward.ops[i]) || quantizes_repeated(forward.ops[i]))
                for (TensorId id : forward.ops[i].out)
                    if (id != no_tensor && program.tensors[static_cast<std::size_t>(id)].storage == Storage::activation)
                        producers_[id].push_back(i);
    }

    // `op` with every operand replaced that has to be recomputed; the repeated ops are appended to `out` first.
    Op rewrite(Op op, std::vector<Op>& out) {
        for (TensorId& id : op.in) id = demand(id, op, out);
        return op;
    }

private:
    // A linear layer whose input is computed again keeps no quantized copy of it either, or nothing would be saved
    // (arXiv 2603.07685 section 4.1.4).
    bool quantizes_repeated(const Op& op) const {
        if (op.kind != OpKind::quantize || op.layer < 0) return false;
        const auto found = producers_.find(op.in.front());
        if (found == producers_.end()) return false;
        const Op& producer = forward_.ops[found->second.front()];
        const bool kept = keeps_core_ && producer.module == Module::core_attn && op.module != Module::core_attn;
        return producer.layer == op.layer && !kept;
    }

    TensorId demand(TensorId id, const Op& reader, std::vector<Op>& out) {
        const auto found = producers_.find(id);
        if (id == no_tensor || found == producers_.end()) return id;
        const Op& producer = forward_.ops[found->second.front()];
        if (producer.layer != reader.layer) return id;
        if (keeps_core_ && producer.module == Module::core_attn && reader.module != Module::core_attn) return id;
        const auto done = renamed_.find(id);
        if (done != renamed_.end()) return done->second;
        // A ring writes its output once per step: all its writers are repeated, in order.
        for (std::size_t index : found->second) repeat(index, out);
        return renamed_.at(id);
    }

    void repeat(std::size_t index, std::vector<Op>& out) {
        Op op = rewrite(forward_.ops[index], out);
        op.phase = Phase::recompute;
        for (TensorId& id : op.out) {
            if (id == no_tensor) continue;
            const auto known = renamed_.find(id);
            if (known != renamed_.end()) {
                id = known->second;
                continue;
            }
            const TensorId fresh = repeat_tensor(program_, id);
            renamed_.emplace(id, fresh);
            id = fresh;
        }
        out.push_back(std::move(op));
    }

    Program& program_;
    const Template& forward_;
    bool keeps_core_;
    std::unordered_map<TensorId, std::vector<std::size_t>> producers_;
    std::unordered_map<TensorId, TensorId> renamed_;
};

} // namespace

void recompute_pass(Program& program, const Template& forward, Template& backward, unsigned set, bool keeps_core) {
    if (set == 0) return;
    Repeater repeater(program, forward, set, keeps_core);
    std::vector<Op> ops;
    ops.reserve(backward.ops.size() * 3 / 2);
    for (Op& op : backward.ops) {
        Op rewritten = repeater.rewrite(std::move(op), ops);
        ops.push_back(std::move(rewritten));
    }
    backward.ops = std::move(ops);
}

} // namespace moe
