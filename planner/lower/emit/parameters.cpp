// Bucketing of a chunk's parameters by gradient group, with in-place shards for the distributed optimizer.
#include "planner/lower/emit/parameters.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <tuple>

namespace moe {

Group gradient_group(const Plan& plan, Domain domain, bool sharded) {
    Group group{domain, axis::data};
    if (domain == Domain::dense) group.axes |= axis::context;
    if (!sharded) group.axes |= axis::tensor;
    if (group_size(plan, group) == 1) group.axes = 0;
    return group;
}

int ParameterSet::bucket_for(Domain domain, bool sharded, bool quantized, Dtype low) {
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (!closed_[i] && buckets_[i].domain == domain && sharded_[i] == sharded &&
            buckets_[i].quantizable == quantized && low_[i] == low)
            return static_cast<int>(i);
    Bucket bucket;
    bucket.domain = domain;
    bucket.group = gradient_group(plan_, domain, sharded);
    bucket.group_size = group_size(plan_, bucket.group);
    bucket.chunk = chunk_;
    bucket.layer = layer_;
    bucket.quantizable = quantized;
    buckets_.push_back(bucket);
    low_.push_back(low);
    sharded_.push_back(sharded);
    closed_.push_back(false);
    undecayed_.push_back(0);
    return static_cast<int>(buckets_.size()) - 1;
}

void ParameterSet::declare(const std::string& key, std::vector<Parameter> parameters, bool quantized, bool decay,
                           int copies, std::optional<Precision> precision) {
    if (sealed_ || has(key)) fail("parameter '{}' is declared twice or too late", key);
    const int tp = plan_.tp, etp = plan_.etp;
    const Domain domain = parameters.front().domain;
    const int degree = domain == Domain::dense ? tp : etp;
    const bool sharded = parameters.front().shard_dim >= 0 && degree > 1;
    const Precision module = domain == Domain::expert ? plan_.experts() : plan_.precision;
    if (bf16_) quantized = false;
    Dtype low = quantized ? quantized_dtype(precision.value_or(module)) : Dtype::bf16;
    // What stays FP32 in a BF16 run lies in a bucket of its own.
    if (precision == Precision::fp32 && plan_.precision != Precision::fp32) low = Dtype::f32;
    // FSDP gathers a layer at once: what nobody quantizes needs no collective of its own.
    if (plan_.reshards() && low == Dtype::bf16) quantized = false;
    // A table with copies on other pipeline ranks lies alone, so that all holders cut it into the same shards.
    const bool alone = key == "embedding" && shares_table(plan_);
    const std::vector<bool> open = closed_;
    if (alone) closed_.assign(closed_.size(), true);
    const int index = bucket_for(domain, sharded, quantized, low);
    if (alone) {
        std::copy(open.begin(), open.end(), closed_.begin());
        closed_.back() = true;
    }
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

void ParameterSet::boundary(int layer) {
    const bool behind_layer = layer_ >= 0;
    layer_ = layer;
    if (plan_.reshards()) {
        closed_.assign(closed_.size(), true);
        return;
    }
    if (!behind_layer || plan_.pp > 1) return; // the chunk is the bucket: its reduction runs under the other chunks
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (buckets_[i].decayed + undecayed_[i] >= cut_elements(buckets_[i])) closed_[i] = true;
}

TensorId add_flat(Program& program, std::string name, Dtype dtype, Storage storage, std::int64_t elements, int chunk) {
    Tensor t;
    t.name = std::move(name);
    t.dtype = dtype;
    t.storage = storage;
    t.rows = elements;
    t.expected_rows = static_cast<double>(elements);
    t.chunk = chunk;
    program.tensors.push_back(std::move(t));
    return static_cast<TensorId>(program.tensors.size() - 1);
}

namespace {

// This rank's slice of a whole bucket, in place.
TensorId add_shard(Program& program, const Bucket& b, TensorId whole, std::string name, Dtype dtype) {
    if (b.group_size == 1) return whole;
    const Storage storage = program.tensors[static_cast<std::size_t>(whole)].storage;
    const TensorId id = add_flat(program, std::move(name), dtype, storage, b.elements / b.group_size, b.chunk);
    program.tensors[static_cast<std::size_t>(id)].base = whole;
    program.tensors[static_cast<std::size_t>(id)].shard_group = b.group;
    return id;
}

} // namespace

void ParameterSet::seal(Program& program, bool list) {
    sealed_ = true;
    const Dtype act = activation_dtype(plan_.precision);
    const Dtype moments = plan_.optimizer.bf16_moments ? Dtype::bf16 : Dtype::f32;
    const Dtype sums = plan_.gradients == Precision::bf16 ? Dtype::bf16 : Dtype::f32;
    // On the device only while the optimizer runs, where they are offloaded.
    const Storage states = (plan_.offload & offload::optimizer) != 0 ? Storage::activation : Storage::optimizer;
    const std::size_t base = program.buckets.size();
    const auto table = keys_.find("embedding");
    if (table != keys_.end() && shares_table(plan_))
        buckets_[static_cast<std::size_t>(table->second.bucket)].copy =
            program.pipeline_rank != table_holders(plan_).front();
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        Bucket& b = buckets_[i];
        const std::int64_t used = b.decayed + undecayed_[i];
        // 64 elements keep every shard aligned to 128 bytes in BF16.
        const std::int64_t unit = 64 * static_cast<std::int64_t>(b.group_size);
        b.elements = (used + unit - 1) / unit * unit;
        const std::int64_t own = b.elements / b.group_size;
        const std::string name = fmt::format("chunk{}.bucket{}", chunk_, i);
        const auto flat = [&](const char* what, Dtype dtype, Storage storage, std::int64_t n) {
            return add_flat(program, name + what, dtype, storage, n, chunk_);
        };
        const Dtype low = low_[i];
        const bool low_weights = is_quantized(low);
        const Dtype plain = low == Dtype::f32 ? low : act;
        if (plan_.reshards() && b.group_size > 1) {
            b.weights = b.weight_shard = flat(".weights", plain, Storage::parameter, own);
            b.gradients = b.gradient_shard = flat(".gradients", sums, Storage::gradient, own);
        } else {
            // Quantized weights are kept row-wise and column-wise (GEMMs read both ways), the BF16 copy is not kept.
            b.weights = flat(".weights", low_weights ? low : plain, Storage::parameter,
                             low_weights ? 2 * b.elements : b.elements);
            b.gradients = flat(".gradients", sums, Storage::gradient, b.elements);
            b.gradient_shard = add_shard(program, b, b.gradients, name + ".gradient_shard", sums);
            const bool from_master = low == Dtype::fp8_block && plan_.blocks_by_rows();
            if (low_weights && !(from_master && b.group_size == 1)) {
                b.staging = flat(".staging", Dtype::bf16, Storage::gradient, b.elements);
                program.tensors[static_cast<std::size_t>(b.staging)].base = b.gradients;
                b.weight_shard = b.group_size == 1
                                     ? b.staging
                                     : add_shard(program, b, b.gradients, name + ".weight_shard", Dtype::bf16);
            } else if (!low_weights) {
                b.weight_shard = add_shard(program, b, b.weights, name + ".weight_shard", plain);
            }
        }
        b.master = flat(".master", Dtype::f32, states, own);
        b.exp_avg = flat(".exp_avg", moments, states, own);
        b.exp_avg_sq = flat(".exp_avg_sq", moments, states, own);
        if (const int bytes = plan_.optimizer_copy_bytes(); bytes > 0)
            b.copies = flat(".copies", Dtype::f32, Storage::activation, own * bytes / 4);
        if (low == Dtype::fp8_block && plan_.blocks_by_rows() && !b.resharded()) add_matrices(program, i);
        if (states == Storage::optimizer) continue;
        b.host_master = flat(".host_master", Dtype::f32, Storage::host, own);
        b.host_exp_avg = flat(".host_exp_avg", moments, Storage::host, own);
        b.host_exp_avg_sq = flat(".host_exp_avg_sq", moments, Storage::host, own);
        for (const TensorId id : {b.host_master, b.host_exp_avg, b.host_exp_avg_sq})
            program.tensors[static_cast<std::size_t>(id)].per_micro_batch = false;
    }
    if (plan_.reshards()) add_buffers(program);
    program.buckets.insert(program.buckets.end(), buckets_.begin(), buckets_.end());
    if (list) list_parameters(program, static_cast<int>(base));
}

// One view of the source and one of both quantized forms for every key; see QuantizeAttr.
void ParameterSet::add_matrices(Program& program, std::size_t index) {
    Bucket& b = buckets_[index];
    std::vector<std::pair<std::int64_t, const std::string*>> order; // as they lie in the bucket
    for (const auto& [key, entry] : keys_)
        if (entry.bucket == static_cast<int>(index)) order.emplace_back(entry.offset, &key);
    std::sort(order.begin(), order.end());
    for (const auto& [offset, key] : order) {
        const Key& entry = keys_.at(*key);
        const std::int64_t cols = parameters_[entry.first].local_cols, rows = entry.elements / cols;
        Bucket::Matrix m{no_tensor, no_tensor, entry.copies, rows / entry.copies, cols};
        const std::int64_t scales = QuantizeAttr{m.copies, m.n, m.k}.scales();
        // Everything lies where 16-byte accesses reach it, and the scales in what the bucket has for them.
        if (entry.offset % 256 != 0 || entry.elements % 256 != 0 || 8 * scales > entry.elements / 16)
            fail("{}: {} matrices of {} x {} behind {} elements have no place for their blocks", *key, m.copies, m.n,
                 m.k, entry.offset);
        const auto view = [&](TensorId base, const char* what, std::int64_t forms) {
            const Tensor whole = program.tensors[static_cast<std::size_t>(base)]; // a copy: tensors are added below
            const TensorId id = add_flat(program, *key + what, whole.dtype, whole.storage, forms * rows, b.chunk);
            Tensor& t = program.tensors[static_cast<std::size_t>(id)];
            t.cols = cols;
            t.base = whole.base == no_tensor ? base : whole.base;
            t.offset = forms * entry.offset;
            return id;
        };
        m.source = view(b.group_size == 1 ? b.master : b.staging, ".plain", 1);
        m.value = view(b.weights, ".blocks", 2);
        b.matrices.push_back(m);
    }
}

void ParameterSet::add_buffers(Program& program) {
    const Dtype act = activation_dtype(plan_.precision);
    const Dtype sums = plan_.gradients == Precision::bf16 ? Dtype::bf16 : Dtype::f32;
    // Buckets of one kind in layers of even or odd places share their buffers: the next layer's weights arrive while
    // this one computes, and no sooner. The ends of the model have their own.
    using Turn = std::tuple<Domain, bool, Dtype, int>;
    std::map<Turn, std::vector<std::size_t>> turns;
    int place = 0, last_layer = -1;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        const Bucket& b = buckets_[i];
        if (b.layer >= 0 && b.layer != last_layer) ++place, last_layer = b.layer;
        const int turn = b.layer >= 0 ? place % 2 : 2 + static_cast<int>(i);
        if (b.group_size > 1) turns[{b.domain, sharded_[i], low_[i], turn}].push_back(i);
    }
    for (const auto& [turn, members] : turns) {
        std::int64_t most = 0;
        for (const std::size_t i : members) most = std::max(most, buckets_[i].elements);
        const Dtype low = std::get<Dtype>(turn);
        const bool low_weights = is_quantized(low);
        const Dtype plain = low == Dtype::f32 ? low : act;
        const std::string name = fmt::format("chunk{}.turn{}", chunk_, members.front());
        const TensorId gathered = add_flat(program, name + ".gathered", low_weights ? low : plain, Storage::activation,
                                           low_weights ? 2 * most : most, chunk_);
        const TensorId sums_id = add_flat(program, name + ".whole_gradients", sums, Storage::activation, most, chunk_);
        for (const std::size_t i : members) {
            Bucket& b = buckets_[i];
            b.gathered = gathered;
            b.whole_gradients = sums_id;
            if (low_weights)
                b.staging = add_flat(program, fmt::format("chunk{}.bucket{}.staging", chunk_, i), Dtype::bf16,
                                     Storage::activation, b.elements, chunk_);
        }
    }
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
                p.copy = buckets_[static_cast<std::size_t>(p.bucket)].copy;
                p.bucket += first_bucket;
                p.offset += shift + entry->elements / entry->copies * copy;
                if (p.domain == Domain::expert) p.local_expert = copy;
                program.parameters.push_back(std::move(p));
            }
    }
}

Weight ParameterSet::weight(Program& program, const std::string& key, std::int64_t n, std::int64_t k) {
    const auto found = keys_.find(key);
    if (found == keys_.end() && lender_ && lender_->has(key)) return lender_->weight(program, key, n, k);
    if (!sealed_ || found == keys_.end()) fail("no parameter is declared under '{}'", key);
    Key& entry = found->second;
    if (n * k != entry.elements) fail("parameter '{}' holds {} elements, not {} x {}", key, entry.elements, n, k);
    const auto view = entry.views.find({n, k});
    if (view != entry.views.end()) return {view->second.first, view->second.second, n, k};
    const Bucket& b = buckets_[static_cast<std::size_t>(entry.bucket)];
    const auto add = [&](TensorId base, const char* what, std::int64_t forms) {
        const Tensor& whole = program.tensors[static_cast<std::size_t>(base)];
        Tensor t;
        t.name = key + what;
        t.dtype = whole.dtype;
        t.storage = whole.storage;
        t.rows = forms * n; // of which a product reads one
        t.cols = k;
        t.expected_rows = static_cast<double>(n);
        t.chunk = chunk_;
        t.base = base;
        t.offset = forms * (entry.offset + (entry.decay ? 0 : b.decayed));
        program.tensors.push_back(std::move(t));
        return static_cast<TensorId>(program.tensors.size() - 1);
    };
    const Weight weight{add(b.resharded() ? b.gathered : b.weights, ".weight", b.matrices.empty() ? 1 : 2),
                        add(b.resharded() ? b.whole_gradients : b.gradients, ".gradient", 1), n, k};
    entry.views.emplace(std::pair{n, k}, std::pair{weight.value, weight.gradient});
    return weight;
}

std::vector<int> table_holders(const Plan& plan) {
    std::vector<int> ranks;
    if (plan.pp == 1) return {0};
    const std::vector<Stage> all = stages(plan);
    for (std::size_t s = 0; s < all.size(); ++s)
        if (all[s].embedding || all[s].mtp > 0 || (all[s].loss && plan.model->tied_embeddings))
            ranks.push_back(rank_of_stage(plan.schedule, plan.pp, static_cast<int>(s)));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

bool shares_table(const Plan& plan) {
    const bool read_again = plan.model->tied_embeddings || !plan.model->mtp.empty();
    return stack_traits(plan).adds_up_shards_of_tied_table && plan.pp > 1 && read_again &&
           table_holders(plan).size() > 1;
}

} // namespace moe
