// Bucketing of a chunk's parameters by gradient group, with in-place shards for the distributed optimizer.
#include "planner/parameters.hpp"

#include "planner/builder.hpp"
#include "planner/error.hpp"
#include "planner/lower.hpp"

#include <algorithm>

namespace moe {

Group gradient_group(const Plan& plan, Domain domain, bool sharded) {
    Group group{domain, axis::data};
    if (domain == Domain::dense) group.axes |= axis::context;
    if (!sharded) group.axes |= axis::tensor;
    if (group_size(plan, group) == 1) group.axes = 0;
    return group;
}

int ParameterSet::bucket_for(Domain domain, bool sharded, bool quantized) {
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (!closed_[i] && buckets_[i].domain == domain && sharded_[i] == sharded && quantized_[i] == quantized)
            return static_cast<int>(i);
    Bucket bucket;
    bucket.domain = domain;
    bucket.group = gradient_group(plan_, domain, sharded);
    bucket.group_size = group_size(plan_, bucket.group);
    bucket.chunk = chunk_;
    buckets_.push_back(bucket);
    quantized_.push_back(quantized);
    sharded_.push_back(sharded);
    closed_.push_back(false);
    undecayed_.push_back(0);
    return static_cast<int>(buckets_.size()) - 1;
}

void ParameterSet::declare(const std::string& key, std::vector<Parameter> parameters, bool quantized, bool decay,
                           int copies) {
    if (sealed_ || keys_.count(key)) fail("parameter '{}' is declared twice or too late", key);
    const int tp = plan_.tp, etp = plan_.etp;
    const Domain domain = parameters.front().domain;
    const int degree = domain == Domain::dense ? tp : etp;
    const bool sharded = parameters.front().shard_dim >= 0 && degree > 1;
    const int index = bucket_for(domain, sharded, quantized);
    Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
    std::int64_t& part = decay ? bucket.decayed : undecayed_[static_cast<std::size_t>(index)];
    Key entry{index, decay, part, 0, parameters_.size(), parameters.size(), copies, {}};
    std::int64_t one = 0;
    for (Parameter& p : parameters) {
        if (p.padded_rows == 0) p.padded_rows = p.rows;
        p.local_rows = p.shard_dim == 0 ? p.padded_rows / degree : p.padded_rows;
        p.local_cols = p.shard_dim == 1 ? p.cols / degree : p.cols;
        p.bucket = index;
        p.offset = part + one;
        one += p.local_elements();
        parameters_.push_back(std::move(p));
    }
    entry.elements = one * copies;
    part += entry.elements;
    keys_.emplace(key, std::move(entry));
}

// Megatron's bucket size: max(40 M, 1 M per rank of the group) elements.
std::int64_t ParameterSet::cut_elements(const Bucket& bucket) const {
    return std::max<std::int64_t>(40'000'000, 1'000'000 * static_cast<std::int64_t>(bucket.group_size));
}

void ParameterSet::boundary() {
    if (plan_.pp > 1) return; // the chunk is the bucket: its reduction runs under the other chunks' work
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (buckets_[i].decayed + undecayed_[i] >= cut_elements(buckets_[i])) closed_[i] = true;
}

void ParameterSet::seal(Program& program, bool list) {
    sealed_ = true;
    const Dtype act = activation_dtype(plan_.precision), low = quantized_dtype(plan_.precision);
    const Dtype moments = plan_.optimizer.bf16_moments ? Dtype::bf16 : Dtype::f32;
    const auto add = [&](Tensor tensor) {
        program.tensors.push_back(std::move(tensor));
        return static_cast<TensorId>(program.tensors.size() - 1);
    };
    const auto flat = [&](std::string name, Dtype dtype, Storage storage, std::int64_t n) {
        Tensor t;
        t.name = std::move(name);
        t.dtype = dtype;
        t.storage = storage;
        t.rows = n;
        t.expected_rows = static_cast<double>(n);
        t.chunk = chunk_;
        return add(t);
    };
    const int base = static_cast<int>(program.buckets.size());
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        Bucket& b = buckets_[i];
        const std::int64_t used = b.decayed + undecayed_[i];
        // 64 elements keep every shard aligned to 128 bytes in BF16.
        const std::int64_t unit = 64 * static_cast<std::int64_t>(b.group_size);
        b.elements = (used + unit - 1) / unit * unit;
        const std::string name = fmt::format("chunk{}.bucket{}", chunk_, i);
        const bool low_weights = quantized_[i] && low != Dtype::bf16;
        // Quantized weights are kept row-wise and column-wise (GEMMs read both ways), the BF16 copy is not kept.
        b.weights = flat(name + ".weights", low_weights ? low : act, Storage::parameter,
                         low_weights ? 2 * b.elements : b.elements);
        b.gradients = flat(name + ".gradients", Dtype::f32, Storage::gradient, b.elements);
        const auto shard = [&](TensorId whole, const char* what, Dtype dtype) {
            if (b.group_size == 1) return whole;
            Tensor t;
            t.name = name + what;
            t.dtype = dtype;
            t.storage = program.tensors[static_cast<std::size_t>(whole)].storage;
            t.rows = b.elements / b.group_size;
            t.expected_rows = static_cast<double>(t.rows);
            t.chunk = chunk_;
            t.base = whole;
            t.shard_group = b.group;
            return add(t);
        };
        b.gradient_shard = shard(b.gradients, ".gradient_shard", Dtype::f32);
        if (low_weights) {
            Tensor t;
            t.name = name + ".staging";
            t.dtype = Dtype::bf16;
            t.storage = Storage::gradient;
            t.rows = b.elements;
            t.expected_rows = static_cast<double>(t.rows);
            t.chunk = chunk_;
            t.base = b.gradients;
            b.staging = add(t);
            b.weight_shard = b.group_size == 1 ? b.staging : shard(b.gradients, ".weight_shard", Dtype::bf16);
        } else {
            b.weight_shard = shard(b.weights, ".weight_shard", act);
        }
        const std::int64_t own = b.elements / b.group_size;
        b.master = flat(name + ".master", Dtype::f32, Storage::optimizer, own);
        b.exp_avg = flat(name + ".exp_avg", moments, Storage::optimizer, own);
        b.exp_avg_sq = flat(name + ".exp_avg_sq", moments, Storage::optimizer, own);
        program.buckets.push_back(b);
    }
    if (list) list_parameters(program, base);
}

// In the order of declaration, copies written out.
void ParameterSet::list_parameters(Program& program, int first_bucket) const {
    std::vector<const Key*> order;
    for (const auto& [key, entry] : keys_) order.push_back(&entry);
    std::sort(order.begin(), order.end(), [](const Key* a, const Key* b) { return a->first < b->first; });
    for (const Key* entry : order) {
        const std::int64_t shift = entry->decay ? 0 : buckets_[static_cast<std::size_t>(entry->bucket)].decayed;
        for (int copy = 0; copy < entry->copies; ++copy)
            for (std::size_t i = entry->first; i < entry->first + entry->count; ++i) {
                Parameter p = parameters_[i];
                p.bucket += first_bucket;
                p.offset += shift + entry->elements / entry->copies * copy;
                if (p.domain == Domain::expert) p.local_expert = copy;
                program.parameters.push_back(std::move(p));
            }
    }
}

Weight ParameterSet::weight(Program& program, const std::string& key, std::int64_t n, std::int64_t k) {
    const auto found = keys_.find(key);
    if (!sealed_ || found == keys_.end()) fail("no parameter is declared under '{}'", key);
    Key& entry = found->second;
    if (n * k != entry.elements) fail("parameter '{}' holds {} elements, not {} x {}", key, entry.elements, n, k);
    const auto view = entry.views.find({n, k});
    if (view != entry.views.end()) return {view->second.first, view->second.second, n, k};
    const Bucket& b = buckets_[static_cast<std::size_t>(entry.bucket)];
    const auto add = [&](TensorId base, const char* what) {
        const Tensor& whole = program.tensors[static_cast<std::size_t>(base)];
        Tensor t;
        t.name = key + what;
        t.dtype = whole.dtype;
        t.storage = whole.storage;
        t.rows = n;
        t.cols = k;
        t.expected_rows = static_cast<double>(n);
        t.chunk = chunk_;
        t.base = base;
        t.offset = entry.offset + (entry.decay ? 0 : b.decayed);
        program.tensors.push_back(std::move(t));
        return static_cast<TensorId>(program.tensors.size() - 1);
    };
    const Weight weight{add(b.weights, ".weight"), add(b.gradients, ".gradient"), n, k};
    entry.views.emplace(std::pair{n, k}, std::pair{weight.value, weight.gradient});
    return weight;
}

} // namespace moe
