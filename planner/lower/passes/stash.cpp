// Insertion of copies between planned buffers of routed rows and pages.
#include "planner/lower/passes/stash.hpp"

#include <cmath>
#include <map>
#include <vector>

namespace moe::passes {

namespace {

// Pages over the expected rows. Source: Megatron-Bridge's full-iteration recipes (stash factor 1.2 of device memory).
constexpr double page_factor = 1.2;

struct Stashed {
    program::TensorId pages = program::no_tensor,
                      again = program::no_tensor; // again: the planned buffer that backward reads
    std::size_t writer = 0;                       // number of the op in forward that writes it
    std::int16_t layer = -1;
    program::Module module = program::Module::experts;
};

bool holds_spare_rows(const program::Tensor& t) {
    return t.storage == program::Storage::activation && t.base == program::no_tensor &&
           t.expected_rows * page_factor < static_cast<double>(t.rows);
}

program::Op copy(program::OpKind kind, const Stashed& s, program::TensorId from, program::TensorId to,
                 program::Phase phase, double bytes) {
    program::Op op;
    op.kind = kind;
    op.stream = program::Stream::host;
    op.module = s.module;
    op.phase = phase;
    op.layer = s.layer;
    op.in = {from};
    op.out = {to};
    op.bytes = 2.0 * bytes;
    return op;
}

std::map<program::TensorId, Stashed> find_stashed(program::Program& program, const program::Template& forward,
                                                  const program::Template& backward) {
    std::map<program::TensorId, Stashed> found;
    std::vector<bool> read(program.tensors.size(), false); // by an op of the backward
    for (const program::Op& op : backward.ops)
        for (const program::TensorId id : op.in)
            if (id != program::no_tensor) read[static_cast<std::size_t>(id)] = true;
    for (std::size_t i = 0; i < forward.ops.size(); ++i)
        for (const program::TensorId id : forward.ops[i].out) {
            if (id == program::no_tensor || !holds_spare_rows(program.tensors[static_cast<std::size_t>(id)])) continue;
            if (!read[static_cast<std::size_t>(id)]) continue;
            Stashed& s = found[id];
            s.writer = i;
            s.layer = forward.ops[i].layer;
            s.module = forward.ops[i].module;
        }
    for (auto& [id, s] : found) {
        program::Tensor pages = program.tensors[static_cast<std::size_t>(id)];
        pages.name += ".pages";
        pages.rows = static_cast<std::int64_t>(std::ceil(pages.expected_rows * page_factor));
        program.tensors.push_back(std::move(pages));
        s.pages = static_cast<program::TensorId>(program.tensors.size()) - 1;
        s.again = program::repeat_tensor(program, id);
    }
    return found;
}

} // namespace

void stash_pass(program::Program& program, program::Template& forward, program::Template& backward) {
    const std::map<program::TensorId, Stashed> stashed = find_stashed(program, forward, backward);
    if (stashed.empty()) return;
    const auto bytes = [&](program::TensorId id) {
        return program.tensors[static_cast<std::size_t>(id)].expected_bytes();
    };
    std::vector<std::vector<program::TensorId>> written(forward.ops.size()); // stashed tensors by their last writer
    std::map<std::int16_t, std::vector<program::TensorId>> of_layer;
    for (const auto& [id, s] : stashed) {
        written[s.writer].push_back(id);
        of_layer[s.layer].push_back(id);
    }
    std::vector<program::Op> ops;
    ops.reserve(forward.ops.size() + stashed.size());
    for (std::size_t i = 0; i < forward.ops.size(); ++i) {
        ops.push_back(std::move(forward.ops[i]));
        for (const program::TensorId id : written[i]) {
            const Stashed& s = stashed.at(id);
            ops.push_back(copy(program::OpKind::stash_rows, s, id, s.pages, program::Phase::forward, bytes(id)));
        }
    }
    forward.ops = std::move(ops);

    std::vector<program::TensorId> again(program.tensors.size(), program::no_tensor); // by stashed tensor
    for (const auto& [id, s] : stashed) again[static_cast<std::size_t>(id)] = s.again;

    // A layer's pages come back while its first backward ops run, on a stream of their own.
    ops = {};
    ops.reserve(backward.ops.size() + stashed.size());
    std::int16_t layer = -1;
    for (program::Op& op : backward.ops) {
        if (op.layer != layer && op.layer >= 0) {
            layer = op.layer;
            for (const program::TensorId id : of_layer[layer]) {
                const Stashed& s = stashed.at(id);
                ops.push_back(
                    copy(program::OpKind::unstash_rows, s, s.pages, s.again, program::Phase::dgrad, bytes(id)));
            }
        }
        for (program::TensorId& id : op.in) {
            const program::TensorId other = id == program::no_tensor ? id : again[static_cast<std::size_t>(id)];
            if (other != program::no_tensor) id = other;
        }
        ops.push_back(std::move(op));
    }
    backward.ops = std::move(ops);
}

} // namespace moe::passes
