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
        : program_(program), adds_(plan::stack_traits(plan).adds_to_shards), reduces_bf16_(emit::reduces_copy(plan)) {
        for (const program::Bucket& b : program.buckets) gathered_.insert(b.gathered);
    }

    void forward(program::Template& tmpl) { rewrite(tmpl, false); }
    // Layers read a second copy there; what lies outside of them (LM head, MTP inputs) is still gathered.
    void backward(program::Template& tmpl) {
        for (program::Op& op : tmpl.ops)
            for (program::TensorId& id : op.in) id = again(id, op.layer);
        if (reduces_bf16_) sum_apart(tmpl);
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
        return std::any_of(op.out.begin(), op.out.end(), [&](program::TensorId id) { return begin_in(b, id) >= 0; });
    }
    // The first element of a bucket's gradients that a tensor is; -1 where it is none of them.
    std::int64_t begin_in(const program::Bucket& b, program::TensorId id) {
        if (id == program::no_tensor) return -1;
        const program::Tensor& t = tensor(id);
        if (t.base == b.whole_gradients) return t.offset;
        for (const Apart& part : apart_[b.gradient_shard])
            if (t.base == part.sums) return part.begin + t.offset;
        return -1;
    }
    void reduce(const program::Bucket& b, const program::Template& tmpl,
                std::vector<std::vector<program::Op>>& behind) {
        for (std::size_t i = tmpl.ops.size(); i-- > 0;) {
            if (!writes(tmpl.ops[i], b)) continue;
            const auto bytes = [](program::Dtype dtype, std::int64_t n) {
                return static_cast<double>(program::bytes_of(dtype, n));
            };
            round(b, behind[i]);
            const program::Dtype dtype = tensor(b.whole_gradients).dtype;
            const program::TensorId reduced = adds_ ? own_part(b) : b.gradient_shard;
            program::Op sum = make(program::OpKind::reduce_scatter, b, true, b.whole_gradients, {reduced});
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
    // What was summed apart, to its place in what is reduced.
    void round(const program::Bucket& b, std::vector<program::Op>& ops) {
        for (const Apart& part : apart_[b.gradient_shard]) {
            const std::int64_t elements = part.end - part.begin;
            program::Op op = make(program::OpKind::cast, b, true, part.sums,
                                  {view(b.whole_gradients, ".rounded", part.begin, elements)});
            op.bytes = narrow_op(static_cast<double>(elements)).bytes;
            ops.push_back(std::move(op));
        }
    }
    // This rank's part of a bucket's whole gradients, in place.
    program::TensorId own_part(const program::Bucket& b) {
        const program::TensorId id = view(b.whole_gradients, ".reduced", 0, b.elements / b.group_size);
        tensor(id).shard_group = b.group;
        return id;
    }
    program::TensorId view(program::TensorId base, const char* what, std::int64_t from, std::int64_t elements) {
        const program::Tensor whole = tensor(base); // This is a copy, as a tensor is added below.
        const program::TensorId id =
            emit::add_flat(program_, whole.name + what, whole.dtype, whole.storage, elements, whole.chunk);
        tensor(id).base = base;
        tensor(id).offset = from;
        return id;
    }

    struct Apart { // elements [begin, end) of a bucket's gradients and their sums in FP32
        std::int64_t begin, end;
        program::TensorId sums;
    };
    struct Write { // of elements [begin, end) of a bucket's gradients
        std::int64_t begin, end;
        program::TensorId id;
        program::Op* op;
    };
    std::vector<Write> writes_in_order(const program::Bucket& b, program::Template& tmpl) {
        std::vector<Write> list;
        for (program::Op& op : tmpl.ops) {
            if (!writes(op, b)) continue;
            for (const program::TensorId id : op.out)
                if (const std::int64_t begin = begin_in(b, id); begin >= 0)
                    list.push_back({begin, begin + tensor(id).elements(), id, &op});
        }
        std::sort(list.begin(), list.end(), [](const Write& x, const Write& y) { return x.begin < y.begin; });
        return list;
    }
    // What is not written by one product alone; neighbours are one part.
    std::vector<Apart> parts_of_sums(const std::vector<Write>& list) {
        std::vector<Apart> parts;
        for (std::size_t i = 0, next = 0; i < list.size(); i = next) { // [i, next) overlap.
            std::int64_t end = list[i].end;
            for (next = i + 1; next < list.size() && list[next].begin < end; ++next)
                end = std::max(end, list[next].end);
            if (next == i + 1 && rounds_once(*list[i].op, tensor(list[i].id))) continue;
            if (parts.empty() || parts.back().end != list[i].begin)
                parts.push_back({list[i].begin, end, program::no_tensor});
            parts.back().end = end;
        }
        return parts;
    }
    // Whole gradients in BF16 are what products write there, each rounded once. What else adds to them, or writes an
    // element twice, sums in FP32 beside them.
    void sum_apart(program::Template& tmpl) {
        for (const program::Bucket& b : program_.buckets) {
            if (!b.resharded()) continue;
            const std::vector<Write> list = writes_in_order(b, tmpl);
            std::vector<Apart> parts = parts_of_sums(list);
            const program::Tensor whole = tensor(b.whole_gradients); // This is a copy, as tensors are added below.
            for (Apart& part : parts) {
                part.sums = emit::add_flat(program_, whole.name + ".sums", program::Dtype::f32, whole.storage,
                                           part.end - part.begin, whole.chunk);
                for (const Write& write : list) {
                    if (write.begin < part.begin || write.end > part.end) continue;
                    program::Tensor& t = tensor(write.id);
                    t.dtype = program::Dtype::f32;
                    t.base = part.sums;
                    t.offset = write.begin - part.begin;
                    write.op->bytes += 2.0 * static_cast<double>(t.elements()); // beside those of BF16
                }
            }
            apart_[b.gradient_shard] = std::move(parts);
        }
    }
    // True of a product of BF16 that makes all of a gradient at once.
    bool rounds_once(program::Op& op, const program::Tensor& gradient) {
        const std::size_t operands = op.kind == program::OpKind::grouped_gemm ? 3 : 2;
        return adds(op, gradient) != nullptr && op.in.size() == operands &&
               tensor(op.in[0]).dtype == program::Dtype::bf16 && tensor(op.in[1]).dtype == program::Dtype::bf16;
    }

    // The first product that writes a whole gradient sets it; those behind it add to it.
    void settle_gradients(program::Template& tmpl) {
        for (const program::Bucket& b : program_.buckets) {
            if (!b.resharded()) continue;
            WrittenGradients& written = written_[b.gradient_shard];
            for (program::Op& op : tmpl.ops) {
                if (!writes(op, b)) continue;
                for (const program::TensorId id : op.out) {
                    const std::int64_t begin = begin_in(b, id);
                    if (begin < 0) continue;
                    const program::Tensor& t = tensor(id);
                    const std::int64_t end = begin + t.elements();
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
        const auto zero_part = [&](program::TensorId base, std::int64_t from, std::int64_t to) {
            if (from >= to) return;
            program::Op op =
                make(program::OpKind::zero, b, true, program::no_tensor, {view(base, ".unset", from, to - from)});
            op.stream = program::Stream::compute;
            op.bytes = static_cast<double>(program::bytes_of(tensor(base).dtype, to - from));
            before[static_cast<std::size_t>(first - tmpl.ops.begin())].push_back(std::move(op));
        };
        for (auto [from, to] : written_[b.gradient_shard].unset(b.elements)) {
            for (const Apart& part : apart_[b.gradient_shard]) {
                if (part.end <= from || part.begin >= to) continue;
                zero_part(b.whole_gradients, from, part.begin);
                zero_part(part.sums, std::max(from, part.begin) - part.begin, std::min(to, part.end) - part.begin);
                from = part.end;
            }
            zero_part(b.whole_gradients, from, to);
        }
    }

    program::Program& program_;
    bool adds_;                                                       // the stack zeroes and adds by ops of their own
    bool reduces_bf16_;                                               // whole gradients are in BF16
    std::unordered_map<program::TensorId, std::vector<Apart>> apart_; // in order, by the bucket's shard of gradients
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
