// Gathers one layer ahead and reductions one layer behind, as Megatron-FSDP and PyTorch's FSDP2 order them.
#include "planner/lower/passes/reshard.hpp"

#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/lower/passes/step_ops.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

namespace moe::passes {

namespace {

// Ops of one decoder layer that follow each other, or of what lies outside of layers.
struct Run {
    std::size_t begin = 0, end = 0;
    int layer = -1;
};

std::vector<Run> runs_of(const program::Template& tmpl) {
    std::vector<Run> runs;
    for (std::size_t i = 0; i < tmpl.ops.size(); ++i) {
        if (runs.empty() || runs.back().layer != tmpl.ops[i].layer) runs.push_back({i, i, tmpl.ops[i].layer});
        runs.back().end = i + 1;
    }
    return runs;
}

class Resharder {
public:
    Resharder(program::Program& program, const plan::Plan& plan)
        : program_(program),
          adds_(plan::stack_traits(plan).adds_to_shards),
          copies_gradients_(emit::reduces_copy(plan)) {
        for (const program::Bucket& b : program.buckets) gathered_.insert(b.gathered);
    }

    void forward(program::Template& tmpl) { rewrite(tmpl, false); }
    // Layers read a second copy there; what lies outside of them (LM head, MTP inputs) is still gathered.
    void backward(program::Template& tmpl) {
        for (program::Op& op : tmpl.ops)
            for (program::TensorId& id : op.in) id = again(id, op.layer);
        if (adds_) settle_gradients(tmpl);
        rewrite(tmpl, true);
    }

private:
    program::Tensor& tensor(program::TensorId id) { return program_.tensors[static_cast<std::size_t>(id)]; }

    bool reads(const program::Op& op, const program::Bucket& b, program::TensorId gathered) {
        if (op.layer != b.layer) return false;
        return std::any_of(op.in.begin(), op.in.end(), [&](program::TensorId id) {
            return id != program::no_tensor && tensor(id).base == gathered;
        });
    }

    program::TensorId copy(program::TensorId id) {
        const auto known = copies_.find(id);
        if (known != copies_.end()) return known->second;
        const program::TensorId fresh = program::repeat_tensor(program_, id);
        copies_.emplace(id, fresh);
        return fresh;
    }
    // The backward's copy of a view of layer weights; other tensors as they are.
    program::TensorId again(program::TensorId id, int layer) {
        if (id == program::no_tensor || layer < 0) return id;
        const program::TensorId base = tensor(id).base;
        if (base == program::no_tensor || gathered_.count(base) == 0) return id;
        const program::TensorId whole = copy(base), view = copy(id);
        tensor(view).base = whole;
        return view;
    }

    program::Op make(program::OpKind kind, const program::Bucket& b, bool backward, program::TensorId in,
                     program::Operands out) {
        program::Op op;
        op.kind = kind;
        op.stream = program::Stream::data;
        op.module = program::Module::data_parallel;
        op.phase = backward ? program::Phase::dgrad : program::Phase::forward;
        op.layer = static_cast<std::int16_t>(b.layer);
        if (program::is_communication(kind)) op.group = b.group;
        if (in != program::no_tensor) op.in = {in};
        op.out = std::move(out);
        return op;
    }
    void gather(const program::Bucket& b, bool backward, std::vector<program::Op>& out) {
        const auto bytes = [](program::Dtype dtype, std::int64_t n) {
            return static_cast<double>(program::bytes_of(dtype, n));
        };
        const bool again = backward && b.layer >= 0;
        const program::TensorId whole = again ? copy(b.gathered) : b.gathered;
        const program::TensorId arrival = b.staging == program::no_tensor ? whole : again ? copy(b.staging) : b.staging;
        program::Op op = make(program::OpKind::all_gather, b, backward, b.weight_shard, {arrival});
        op.bytes = bytes(tensor(arrival).dtype, b.elements);
        out.push_back(std::move(op));
        if (b.staging == program::no_tensor) return;
        program::Op low = make(program::OpKind::quantize, b, backward, arrival, {whole, program::no_tensor});
        low.bytes = bytes(tensor(arrival).dtype, b.elements) + bytes(tensor(whole).dtype, 2 * b.elements);
        out.push_back(std::move(low));
    }

    void rewrite(program::Template& tmpl, bool backward) {
        const std::vector<Run> runs = runs_of(tmpl);
        std::vector<std::vector<program::Op>> before(tmpl.ops.size()), behind(tmpl.ops.size());
        for (const program::Bucket& b : program_.buckets) {
            if (!b.resharded()) continue;
            if (!backward || b.layer >= 0) {
                const program::TensorId whole = backward ? copy(b.gathered) : b.gathered;
                for (std::size_t r = 0; r < runs.size(); ++r) {
                    const auto begin = tmpl.ops.begin() + static_cast<std::ptrdiff_t>(runs[r].begin),
                               end = tmpl.ops.begin() + static_cast<std::ptrdiff_t>(runs[r].end);
                    if (std::none_of(begin, end, [&](const program::Op& op) { return reads(op, b, whole); })) continue;
                    gather(b, backward, before[runs[r == 0 ? 0 : r - 1].begin]);
                    break;
                }
            }
            if (!backward) continue;
            zero(b, tmpl, before);
            reduce(b, tmpl, behind);
        }
        std::vector<program::Op> ops;
        ops.reserve(tmpl.ops.size() + 4 * program_.buckets.size());
        for (std::size_t i = 0; i < tmpl.ops.size(); ++i) {
            std::move(before[i].begin(), before[i].end(), std::back_inserter(ops));
            ops.push_back(std::move(tmpl.ops[i]));
            std::move(behind[i].begin(), behind[i].end(), std::back_inserter(ops));
        }
        tmpl.ops = std::move(ops);
    }
    // Ops of layers that take turns with a buffer write the same tensor.
    bool writes(const program::Op& op, const program::Bucket& b) {
        if (op.layer != b.layer) return false;
        return std::any_of(op.out.begin(), op.out.end(), [&](program::TensorId id) {
            return id != program::no_tensor && tensor(id).base == b.whole_gradients;
        });
    }
    void reduce(const program::Bucket& b, const program::Template& tmpl,
                std::vector<std::vector<program::Op>>& behind) {
        for (std::size_t i = tmpl.ops.size(); i-- > 0;) {
            if (!writes(tmpl.ops[i], b)) continue;
            const auto bytes = [](program::Dtype dtype, std::int64_t n) {
                return static_cast<double>(program::bytes_of(dtype, n));
            };
            const program::TensorId whole = copies_gradients_ ? narrowed(b, behind[i]) : b.whole_gradients;
            const program::Dtype dtype = tensor(whole).dtype;
            const program::TensorId reduced = adds_ ? own_part(b, whole) : b.gradient_shard;
            program::Op sum = make(program::OpKind::reduce_scatter, b, true, whole, {reduced});
            sum.bytes = bytes(dtype, b.elements);
            behind[i].push_back(std::move(sum));
            if (!adds_) return;
            const std::int64_t own = b.elements / b.group_size;
            program::Op add = make(program::OpKind::add, b, true, reduced, {b.gradient_shard});
            add.in.push_back(b.gradient_shard);
            add.bytes = bytes(dtype, own) + 2.0 * bytes(tensor(b.gradient_shard).dtype, own);
            behind[i].push_back(std::move(add));
            return;
        }
    }
    // The BF16 copy of a bucket's whole gradients that is reduced.
    program::TensorId narrowed(const program::Bucket& b, std::vector<program::Op>& ops) {
        const program::Tensor whole = tensor(b.whole_gradients);
        const program::TensorId copy = emit::add_flat(program_, whole.name + ".bf16", program::Dtype::bf16,
                                                      whole.storage, b.elements, whole.chunk);
        program::Op op = make(program::OpKind::cast, b, true, b.whole_gradients, {copy});
        op.bytes = narrow_op(static_cast<double>(b.elements)).bytes;
        ops.push_back(std::move(op));
        return copy;
    }
    // This rank's part of a bucket's whole gradients, in place.
    program::TensorId own_part(const program::Bucket& b, program::TensorId gradients) {
        const program::Tensor whole = tensor(gradients);
        const program::TensorId id = view(whole, gradients, ".reduced", 0, b.elements / b.group_size);
        tensor(id).shard_group = b.group;
        return id;
    }
    program::TensorId view(const program::Tensor& whole, program::TensorId base, const char* what, std::int64_t from,
                           std::int64_t elements) {
        const program::TensorId id =
            emit::add_flat(program_, whole.name + what, whole.dtype, whole.storage, elements, whole.chunk);
        tensor(id).base = base;
        tensor(id).offset = from;
        return id;
    }

    // The first product that writes a whole gradient sets it; those behind it add to it.
    void settle_gradients(program::Template& tmpl) {
        for (const program::Bucket& b : program_.buckets) {
            if (!b.resharded()) continue;
            WrittenGradients& written = written_[b.gradient_shard];
            for (program::Op& op : tmpl.ops) {
                if (!writes(op, b)) continue;
                for (const program::TensorId id : op.out) {
                    if (id == program::no_tensor || tensor(id).base != b.whole_gradients) continue;
                    const program::Tensor& t = tensor(id);
                    const std::int64_t begin = t.offset, end = t.offset + t.elements();
                    bool* const add = adds(op, t);
                    const bool set = add != nullptr && !written.overlaps(begin, end);
                    if (add != nullptr && !set && !*add) op.bytes += t.expected_bytes();
                    if (add != nullptr) *add = !set;
                    written.write(begin, end, set);
                }
            }
        }
    }
    // What no product sets, on the way to the first op that adds to it.
    void zero(const program::Bucket& b, const program::Template& tmpl, std::vector<std::vector<program::Op>>& before) {
        if (!adds_) return;
        const auto first =
            std::find_if(tmpl.ops.begin(), tmpl.ops.end(), [&](const program::Op& op) { return writes(op, b); });
        if (first == tmpl.ops.end()) return;
        const program::Tensor whole = tensor(b.whole_gradients);
        for (const auto& [from, to] : written_[b.gradient_shard].unset(b.elements)) {
            program::Op op = make(program::OpKind::zero, b, true, program::no_tensor,
                                  {view(whole, b.whole_gradients, ".unset", from, to - from)});
            op.stream = program::Stream::compute;
            op.bytes = static_cast<double>(program::bytes_of(whole.dtype, to - from));
            before[static_cast<std::size_t>(first - tmpl.ops.begin())].push_back(std::move(op));
        }
    }

    program::Program& program_;
    bool adds_;                                                       // the stack zeroes and adds by ops of their own
    bool copies_gradients_;                                           // a BF16 copy of gradients is reduced
    std::unordered_map<program::TensorId, WrittenGradients> written_; // by the bucket's shard of gradients
    std::unordered_map<program::TensorId, program::TensorId> copies_;
    std::unordered_set<program::TensorId> gathered_;
};

} // namespace

void reshard_pass(program::Program& program, const plan::Plan& plan, program::Template& forward,
                  program::Template& backward) {
    Resharder resharder(program, plan);
    resharder.forward(forward);
    resharder.backward(backward);
}

void reshard_forward(program::Program& program, const plan::Plan& plan, program::Template& forward) {
    Resharder(program, plan).forward(forward);
}

} // namespace moe::passes
