// The tensors that the ops of a template read and write, in one list: programs are played by the thousand.
#pragma once

#include "planner/program/program.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moe::replay {

// Tensors by what they are views of, each once for an op that reads or writes it.
class OpAccess {
public:
    OpAccess() = default;
    OpAccess(const program::Program& program, const program::Template& tmpl) {
        for (const program::Op& op : tmpl.ops) {
            reads_.push_back(add(program, op.in));
            writes_.push_back(add(program, op.out));
        }
        reads_.push_back(static_cast<std::uint32_t>(tensors_.size()));
    }

    std::span<const program::TensorId> read(std::size_t op) const { return between(reads_[op], writes_[op]); }
    std::span<const program::TensorId> written(std::size_t op) const { return between(writes_[op], reads_[op + 1]); }

private:
    // The place where those of `ids` begin in the list.
    std::uint32_t add(const program::Program& program, const program::Operands& ids) {
        const auto from = static_cast<std::ptrdiff_t>(tensors_.size());
        for (const program::TensorId id : ids) {
            if (id == program::no_tensor) continue;
            const program::TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
            const program::TensorId root = base == program::no_tensor ? id : base;
            if (std::find(tensors_.begin() + from, tensors_.end(), root) == tensors_.end()) tensors_.push_back(root);
        }
        return static_cast<std::uint32_t>(from);
    }
    std::span<const program::TensorId> between(std::uint32_t from, std::uint32_t to) const {
        return std::span(tensors_).subspan(from, to - from);
    }

    std::vector<program::TensorId> tensors_;
    std::vector<std::uint32_t> reads_, writes_; // op i reads from reads_[i] to writes_[i], writes from there on
};

} // namespace moe::replay
