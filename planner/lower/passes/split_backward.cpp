// Finds the ops of a backward that nothing but gradients of weights depends on.
#include "planner/lower/passes/split_backward.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/passes/tensor.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe::passes {

namespace {

program::TensorId root_of(const program::Program& program, program::TensorId id) {
    while (tensor(program, id).base != program::no_tensor) id = tensor(program, id).base;
    return id;
}

template <class Visit>
void for_each(const program::Operands& ids, Visit visit) {
    for (const program::TensorId id : ids)
        if (id != program::no_tensor) visit(id);
}

using Readers = std::unordered_map<program::TensorId, std::vector<std::size_t>>; // ops by root

Readers readers_of(const program::Program& program, const program::Template& tmpl) {
    Readers readers;
    for (std::size_t i = 0; i < tmpl.ops.size(); ++i)
        for_each(tmpl.ops[i].in, [&](program::TensorId id) { readers[root_of(program, id)].push_back(i); });
    return readers;
}

// Readers follow writers, so that one pass from the end settles every op.
std::vector<bool> deferred_ops(const program::Program& program, const program::Template& backward) {
    const Readers readers = readers_of(program, backward);
    std::vector<bool> deferred(backward.ops.size(), false);
    const auto only_deferred_read = [&](program::TensorId id, std::size_t writer) {
        const auto found = readers.find(root_of(program, id));
        if (found == readers.end()) return false;
        return std::all_of(found->second.begin(), found->second.end(),
                           [&](std::size_t reader) { return reader == writer || deferred[reader]; });
    };
    for (std::size_t i = backward.ops.size(); i-- > 0;) {
        const program::Op& op = backward.ops[i];
        bool waits =
            std::any_of(op.out.begin(), op.out.end(), [](program::TensorId id) { return id != program::no_tensor; });
        for_each(op.out, [&](program::TensorId id) {
            const program::Storage storage = tensor(program, root_of(program, id)).storage;
            waits = waits && (storage == program::Storage::gradient
                                  ? op.phase == program::Phase::wgrad
                                  : storage == program::Storage::activation && only_deferred_read(id, i));
        });
        deferred[i] = waits;
    }
    return deferred;
}

// Ops that wait must find their inputs as they were.
void check_inputs(const program::Program& program, const program::Template& backward,
                  const std::vector<bool>& deferred) {
    std::unordered_map<program::TensorId, std::size_t> last_writer;
    for (std::size_t i = 0; i < backward.ops.size(); ++i)
        if (!deferred[i])
            for_each(backward.ops[i].out, [&](program::TensorId id) { last_writer[root_of(program, id)] = i; });
    for (std::size_t i = 0; i < backward.ops.size(); ++i) {
        if (!deferred[i]) continue;
        for_each(backward.ops[i].in, [&](program::TensorId id) {
            const auto writer = last_writer.find(root_of(program, id));
            if (writer != last_writer.end() && writer->second > i)
                fail("{} of layer {} reads {}, which a later {} overwrites", program::to_string(backward.ops[i].kind),
                     backward.ops[i].layer, tensor(program, id).name,
                     program::to_string(backward.ops[writer->second].kind));
        });
    }
}

// Copies of what the backward itself writes, views included.
class Copies {
public:
    Copies(program::Program& program, const program::Template& forward, const program::Template& backward)
        : program_(program) {
        std::unordered_map<program::TensorId, bool> saved;
        for (const program::Op& op : forward.ops)
            for (const auto* list : {&op.in, &op.out})
                for_each(*list, [&](program::TensorId id) { saved[root_of(program, id)] = true; });
        for (const program::Op& op : backward.ops)
            for_each(op.out, [&](program::TensorId id) {
                const program::TensorId root = root_of(program, id);
                if (tensor(program, root).storage == program::Storage::activation && !saved.count(root))
                    own_[root] = true;
            });
    }
    void rename(program::Template& tmpl) {
        for (program::Op& op : tmpl.ops) {
            for (program::TensorId& id : op.in) id = copy_of(id);
            for (program::TensorId& id : op.out) id = copy_of(id);
        }
    }

private:
    program::TensorId copy_of(program::TensorId id) {
        if (id == program::no_tensor || !own_.count(root_of(program_, id))) return id;
        const auto known = copies_.find(id);
        if (known != copies_.end()) return known->second;
        program::Tensor copy = tensor(program_, id);
        copy.name += ".split";
        copy.base = copy_of(copy.base);
        program_.tensors.push_back(std::move(copy));
        return copies_[id] = static_cast<program::TensorId>(program_.tensors.size() - 1);
    }

    program::Program& program_;
    std::unordered_map<program::TensorId, bool> own_; // flags by root
    std::unordered_map<program::TensorId, program::TensorId> copies_;
};

} // namespace

SplitBackward split_backward(program::Program& program, const program::Template& forward,
                             const program::Template& backward, bool keep_whole) {
    const std::vector<bool> deferred = deferred_ops(program, backward);
    check_inputs(program, backward, deferred);
    SplitBackward split{{plan::SlotKind::dgrad, backward.chunk, {}}, {plan::SlotKind::wgrad, backward.chunk, {}}};
    for (std::size_t i = 0; i < backward.ops.size(); ++i)
        (deferred[i] ? split.wgrad : split.dgrad).ops.push_back(backward.ops[i]);
    if (keep_whole) {
        Copies copies(program, forward, backward);
        copies.rename(split.dgrad);
        copies.rename(split.wgrad);
    }
    return split;
}

} // namespace moe::passes
