// Demand-driven repetition of forward ops in the backward template.
#include "planner/lower/passes/recompute.hpp"

#include "planner/plan/choices.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe::passes {

bool recomputes(unsigned set, const program::Op& op) {
    if (op.layer < 0 || op.phase != program::Phase::forward) return false;
    if (op.kind == program::OpKind::pick_keys && std::get<program::AttentionAttr>(op.attr).kept) return false;
    if (set & plan::recompute::full) return true;
    if (set & plan::recompute::operators)
        return !program::is_communication(op.kind) && op.kind != program::OpKind::attention;
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

// The share of each product that `operators` repeats, by its index among the ops. A packed product is told by what
// reads it: rotation of queries, keys and values, or an activation of two halves.
std::vector<double> repeated_shares(const program::Template& forward) {
    std::unordered_map<program::TensorId, std::vector<double>> packed; // shares of the parts
    for (const program::Op& op : forward.ops) {
        if (const auto* rope = std::get_if<program::RopeAttr>(&op.attr); rope != nullptr && !op.in.empty()) {
            const double all = rope->heads + 2.0 * rope->kv_heads;
            packed[op.in[0]] = {rope->heads / all, rope->kv_heads / all, rope->kv_heads / all};
        }
        if (const auto* act = std::get_if<program::ActivationAttr>(&op.attr); act != nullptr && act->gated)
            packed[op.in[0]] = {0.5, 0.5};
    }
    std::vector<double> shares(forward.ops.size(), 1.0);
    std::unordered_map<program::TensorId, double> known; // by weight: a product may run in pieces, beside its exchange
    int layer = -1, products = 0;
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        const program::Op& op = forward.ops[i];
        if (op.layer != layer) layer = op.layer, products = 0, known.clear();
        // torchtitan leaves the router's gate out of the count and repeats it.
        if (op.kind != program::OpKind::gemm || op.module == program::Module::router) continue;
        const auto [share, fresh] = known.try_emplace(op.in[1], 0.0);
        shares[i] = share->second;
        if (!fresh) continue;
        const auto parts = packed.find(op.out[0]);
        for (const double part : parts == packed.end() ? std::vector<double>{1.0} : parts->second)
            if (++products % 2 == 0) shares[i] = share->second += part;
    }
    return shares;
}

class Repeater {
public:
    Repeater(program::Program& program, program::Template& forward, unsigned set, bool keeps_core)
        : program_(program), forward_(forward), keeps_core_(keeps_core && (set & plan::recompute::full) == 0) {
        if (set & plan::recompute::operators) shares_ = repeated_shares(forward);
        for (std::size_t i = 0; i < forward.ops.size(); ++i)
            if ((recomputes(set, forward.ops[i]) && share(i) > 0.0) || quantizes_repeated(forward.ops[i]))
                for (program::TensorId id : forward.ops[i].out)
                    if (id != program::no_tensor &&
                        program.tensors[static_cast<std::size_t>(id)].storage == program::Storage::activation)
                        producers_[id].push_back(i);
    }

    // Replaces the op's operands that have to be recomputed; the repeated ops are appended to `out`, where the op is
    // not yet.
    void rewrite(program::Op& op, std::vector<program::Op>& out) {
        for (program::TensorId& id : op.in) id = demand(id, op, out);
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
        program::Op op = forward_.ops[index];
        rewrite(op, out);
        op.phase = program::Phase::recompute;
        // The step has the magnitude already.
        if (const auto* round = std::get_if<program::RoundAttr>(&op.attr); round != nullptr && round->slot >= 0)
            op.out.resize(2, program::no_tensor);
        if (share(index) < 1.0) repeat_part(op, index);
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

    double share(std::size_t index) const { return shares_.empty() ? 1.0 : shares_[index]; }

    // Only a part of the product's columns is computed again; the forward keeps the others.
    void repeat_part(program::Op& op, std::size_t index) {
        const program::TensorId kept = program::repeat_tensor(program_, op.out[0]);
        program::Tensor& columns = program_.tensors[static_cast<std::size_t>(kept)];
        columns.again_of = program::no_tensor;
        auto& attr = std::get<program::GemmAttr>(op.attr);
        columns.rows = attr.m;
        columns.expected_rows = static_cast<double>(columns.rows);
        const auto repeated = static_cast<std::int64_t>(std::llround(share(index) * static_cast<double>(attr.n)));
        columns.cols -= std::llround(share(index) * static_cast<double>(columns.cols));
        attr.n = repeated;
        op.flops *= share(index);
        op.bytes *= share(index);
        op.in.push_back(kept);
        forward_.ops[index].out.push_back(kept);
    }

    program::Program& program_;
    program::Template& forward_;
    std::vector<double> shares_; // by op of the forward, empty: whole ops
    bool keeps_core_;
    std::unordered_map<program::TensorId, std::vector<std::size_t>> producers_;
    std::unordered_map<program::TensorId, program::TensorId> renamed_;
};

} // namespace

void recompute_pass(program::Program& program, program::Template& forward, program::Template& backward, unsigned set,
                    bool keeps_core) {
    if (set == 0) return;
    Repeater repeater(program, forward, set, keeps_core);
    std::vector<program::Op> ops;
    ops.reserve(backward.ops.size() * 3 / 2);
    for (program::Op& op : backward.ops) {
        repeater.rewrite(op, ops);
        ops.push_back(std::move(op));
    }
    backward.ops = std::move(ops);
}

} // namespace moe::passes
