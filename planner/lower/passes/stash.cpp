// Insertion of copies between planned buffers of routed rows and pages.
#include "planner/lower/passes/stash.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace moe {

namespace {

// Pages over the expected rows. Source: Megatron-Bridge's full-iteration recipes (stash factor 1.2 of device memory).
constexpr double page_factor = 1.2;

struct Stashed {
    TensorId pages = no_tensor, again = no_tensor; // again: the planned buffer that backward reads
    std::size_t writer = 0;                        // in forward
    std::int16_t layer = -1;
    Module module = Module::experts;
};

bool reads(const Op& op, TensorId id) { return std::find(op.in.begin(), op.in.end(), id) != op.in.end(); }

bool holds_spare_rows(const Tensor& t) {
    return t.storage == Storage::activation && t.base == no_tensor &&
           t.expected_rows * page_factor < static_cast<double>(t.rows);
}

Op copy(OpKind kind, const Stashed& s, TensorId from, TensorId to, Phase phase, double bytes) {
    Op op;
    op.kind = kind;
    op.stream = Stream::host;
    op.module = s.module;
    op.phase = phase;
    op.layer = s.layer;
    op.in = {from};
    op.out = {to};
    op.bytes = 2.0 * bytes;
    return op;
}

std::map<TensorId, Stashed> find_stashed(Program& program, const Template& forward, const Template& backward) {
    std::map<TensorId, Stashed> found;
    for (std::size_t i = 0; i < forward.ops.size(); ++i)
        for (const TensorId id : forward.ops[i].out) {
            if (id == no_tensor || !holds_spare_rows(program.tensors[static_cast<std::size_t>(id)])) continue;
            if (std::none_of(backward.ops.begin(), backward.ops.end(), [&](const Op& op) { return reads(op, id); }))
                continue;
            Stashed& s = found[id];
            s.writer = i;
            s.layer = forward.ops[i].layer;
            s.module = forward.ops[i].module;
        }
    for (auto& [id, s] : found) {
        Tensor pages = program.tensors[static_cast<std::size_t>(id)];
        pages.name += ".pages";
        pages.rows = static_cast<std::int64_t>(std::ceil(pages.expected_rows * page_factor));
        program.tensors.push_back(std::move(pages));
        s.pages = static_cast<TensorId>(program.tensors.size()) - 1;
        s.again = repeat_tensor(program, id);
    }
    return found;
}

} // namespace

void stash_pass(Program& program, Template& forward, Template& backward) {
    const std::map<TensorId, Stashed> stashed = find_stashed(program, forward, backward);
    if (stashed.empty()) return;
    const auto bytes = [&](TensorId id) { return program.tensors[static_cast<std::size_t>(id)].expected_bytes(); };
    std::vector<Op> ops;
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        ops.push_back(std::move(forward.ops[i]));
        for (const auto& [id, s] : stashed)
            if (s.writer == i) ops.push_back(copy(OpKind::stash_rows, s, id, s.pages, Phase::forward, bytes(id)));
    }
    forward.ops = std::move(ops);

    // A layer's pages come back while its first backward ops run, on a stream of their own.
    ops.clear();
    std::int16_t layer = -1;
    for (Op& op : backward.ops) {
        if (op.layer != layer && op.layer >= 0) {
            layer = op.layer;
            for (const auto& [id, s] : stashed)
                if (s.layer == layer)
                    ops.push_back(copy(OpKind::unstash_rows, s, s.pages, s.again, Phase::dgrad, bytes(id)));
        }
        for (TensorId& id : op.in) {
            const auto at = stashed.find(id);
            if (at != stashed.end()) id = at->second.again;
        }
        ops.push_back(std::move(op));
    }
    backward.ops = std::move(ops);
}

} // namespace moe
