// Lifetimes of a template's activations and their packing into one workspace: what plan_memory() and reuses_of() share.
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/program/program.hpp"

#include <limits>
#include <utility>
#include <vector>

namespace moe::memory {

// First and last access of an activation within one template.
struct Lifetime {
    int first = std::numeric_limits<int>::max(), last = -1;
};

// The kinds of templates that touch an activation. One that outlives a template is saved, the rest is transient.
struct Use {
    bool forward = false, backward = false; // backward: whole or either half
    bool dgrad = false, wgrad = false;
    bool saved() const { return (forward && backward) || (dgrad && wgrad); }
};
std::vector<Use> uses(const program::Program& program); // one by TensorId

inline program::TensorId root(const program::Program& program, program::TensorId id) {
    const program::TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
    return base == program::no_tensor ? id : base;
}

// visit(root, op, written) for every activation that an op of the template touches.
template <class Visit>
void for_each_access(const program::Program& program, const program::Template& tmpl, Visit visit) {
    const auto each = [&](const program::Operands& ids, std::size_t op, bool written) {
        for (const program::TensorId id : ids)
            if (id != program::no_tensor &&
                program.tensors[static_cast<std::size_t>(id)].storage == program::Storage::activation)
                visit(root(program, id), static_cast<int>(op), written);
    };
    for (std::size_t i = 0; i < tmpl.ops.size(); ++i) {
        each(tmpl.ops[i].in, i, false);
        each(tmpl.ops[i].out, i, true);
    }
}

// Lifetimes of one template's transients. What nobody in the template writes came from outside and is alive from the
// start.
std::vector<std::pair<program::TensorId, Lifetime>>
transients(const program::Program& program, const program::Template& tmpl, const std::vector<Use>& use);

struct Packed {
    program::TensorId id;
    Lifetime life;
    std::int64_t offset, bytes;
};
// Largest first at the lowest offset that is free over the whole lifetime; returns the height.
std::int64_t pack(const program::Program& program, std::vector<std::pair<program::TensorId, Lifetime>> list,
                  std::vector<Packed>& placed);

} // namespace moe::memory
