// Gathers one layer ahead and reductions one layer behind, as Megatron-FSDP and PyTorch's FSDP2 order them.
#include "planner/lower/passes/reshard.hpp"

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
    explicit Resharder(program::Program& program) : program_(program) {
        for (const program::Bucket& b : program.buckets) gathered_.insert(b.gathered);
    }

    void forward(program::Template& tmpl) { rewrite(tmpl, false); }
    // Layers read a second copy there; what lies outside of them (LM head, MTP inputs) is still gathered.
    void backward(program::Template& tmpl) {
        for (program::Op& op : tmpl.ops)
            for (program::TensorId& id : op.in) id = again(id, op.layer);
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
                     std::vector<program::TensorId> out) {
        program::Op op;
        op.kind = kind;
        op.stream = program::Stream::data;
        op.module = program::Module::data_parallel;
        op.phase = backward ? program::Phase::dgrad : program::Phase::forward;
        op.layer = static_cast<std::int16_t>(b.layer);
        if (kind != program::OpKind::quantize) op.group = b.group;
        op.in = {in};
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
            if (backward) reduce(b, tmpl, behind);
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
    void reduce(const program::Bucket& b, const program::Template& tmpl,
                std::vector<std::vector<program::Op>>& behind) {
        for (std::size_t i = tmpl.ops.size(); i-- > 0;) {
            const program::Op& op = tmpl.ops[i];
            if (op.layer != b.layer) continue;
            const bool writes = std::any_of(op.out.begin(), op.out.end(), [&](program::TensorId id) {
                return id != program::no_tensor && tensor(id).base == b.whole_gradients;
            });
            if (!writes) continue;
            program::Op sum = make(program::OpKind::reduce_scatter, b, true, b.whole_gradients, {b.gradient_shard});
            sum.bytes = static_cast<double>(program::bytes_of(tensor(b.whole_gradients).dtype, b.elements));
            behind[i].push_back(std::move(sum));
            return;
        }
    }

    program::Program& program_;
    std::unordered_map<program::TensorId, program::TensorId> copies_;
    std::unordered_set<program::TensorId> gathered_;
};

} // namespace

void reshard_pass(program::Program& program, program::Template& forward, program::Template& backward) {
    Resharder resharder(program);
    resharder.forward(forward);
    resharder.backward(backward);
}

} // namespace moe::passes
