// Bucketing of a chunk's parameters by gradient group, with in-place shards for the distributed optimizer.
#include "planner/lower/emit/parameters.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace moe::emit {
int ParameterSet::bucket_for(plan::Domain domain, std::uint16_t cut, bool quantized, program::Dtype low, bool muon,
                             bool frozen, bool one_scale) {
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (!closed_[i] && buckets_[i].domain == domain && buckets_[i].cut == cut &&
            buckets_[i].quantizable == quantized && low_[i] == low && muon_[i] == muon &&
            buckets_[i].frozen == frozen && buckets_[i].one_scale == one_scale)
            return static_cast<int>(i);
    program::Bucket bucket;
    bucket.domain = domain;
    bucket.frozen = frozen;
    const plan::Group holders = gradient_group(plan_, domain, cut);
    bucket.group = frozen ? plan::Group{domain, 0} : holders;
    bucket.replicas = frozen ? holders : replica_group(plan_, domain);
    bucket.group_size = plan::group_size(plan_, bucket.group);
    bucket.cut = cut;
    bucket.chunk = chunk_;
    bucket.layer = layer_;
    bucket.quantizable = quantized;
    bucket.one_scale = one_scale;
    buckets_.push_back(bucket);
    low_.push_back(low);
    closed_.push_back(false);
    muon_.push_back(muon);
    undecayed_.push_back(0);
    return static_cast<int>(buckets_.size()) - 1;
}

void ParameterSet::declare(const std::string& key, std::vector<program::Parameter> parameters, bool quantized,
                           bool decay, int copies, std::optional<machine::Precision> precision) {
    if (sealed_ || has(key)) fail("parameter '{}' is declared twice or too late", key);
    const plan::Domain domain = parameters.front().domain;
    const std::uint16_t axis = parameters.front().cut;
    const auto cut_alike = [axis](const program::Parameter& p) { return p.cut == axis; };
    if (!std::all_of(parameters.begin(), parameters.end(), cut_alike)) {
        const auto other = std::stable_partition(parameters.begin(), parameters.end(), cut_alike);
        declare(key + beside, {other, parameters.end()}, quantized, decay, copies, precision);
        parameters.erase(other, parameters.end());
    }
    const int degree = plan::group_size(plan_, {domain, axis});
    const std::uint16_t cut = parameters.front().shard_dim >= 0 && degree > 1 ? axis : std::uint16_t{0};
    const machine::Precision module = domain == plan::Domain::expert ? plan_.experts() : plan_.precision;
    if (bf16_) quantized = false;
    const machine::Precision wanted = precision.value_or(module);
    program::Dtype low = quantized ? quantized_dtype(plan_, wanted) : program::Dtype::bf16;
    const bool one_scale = low == program::Dtype::fp8_block && wanted == machine::Precision::fp8_tensor;
    // Weights that stay FP32 in a BF16 run lie in a bucket of their own.
    if (precision == machine::Precision::fp32 && plan_.precision != machine::Precision::fp32) low = program::Dtype::f32;
    // FSDP gathers a layer at once: what nobody quantizes needs no collective of its own.
    if (plan_.reshards() && low == program::Dtype::bf16) quantized = false;
    // A table with copies on other pipeline ranks lies alone, so that all holders cut it into the same shards.
    const bool alone = key == "embedding" && copies_table(plan_);
    // Muon moves matrices but embeddings and heads, which have a vocabulary (arXiv 2502.16982 section 2.2). Taps of
    // convolutions by channel are vectors.
    const bool muon =
        plan_.optimizer.muon && decay && std::all_of(parameters.begin(), parameters.end(), [](const auto& p) {
            return p.rows > 1 && p.cols > 1 && p.padded_rows == 0 && p.name.find("conv1d") == std::string::npos;
        });
    std::vector<bool> open;
    if (alone) {
        open = closed_;
        closed_.assign(closed_.size(), true);
    }
    const int index = bucket_for(domain, cut, quantized, low, muon, plan_.lora.on() && !adapters_, one_scale);
    if (alone) {
        std::copy(open.begin(), open.end(), closed_.begin());
        closed_.back() = true;
    }
    program::Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
    std::int64_t& part = decay ? bucket.decayed : undecayed_[static_cast<std::size_t>(index)];
    Key entry{index, decay, part, 0, parameters_.size(), parameters.size(), copies, {}};
    std::int64_t one = 0;
    for (program::Parameter& p : parameters) {
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

void ParameterSet::declare_adapted(unsigned target, const std::string& key, std::vector<program::Parameter> parameters,
                                   bool quantized, int copies) {
    if (!plan_.lora.adapts(target)) return declare(key, std::move(parameters), quantized, true, copies);
    const auto stem = [](const program::Parameter& p) { return p.name.substr(0, p.name.rfind(".weight")); };
    const std::int64_t rank = plan_.lora.rank, cols = parameters.front().cols;
    program::Parameter a = parameters.front();
    // Of several matrices the one A bears Megatron-Bridge's name of the product.
    const std::string one = stem(a);
    const std::string joined =
        one.substr(0, one.rfind('.') + 1) + (target == plan::adapted::attention ? "linear_qkv" : "linear_fc1");
    a.name = (parameters.size() == 1 ? one : joined) + ".lora_A.weight";
    a.rows = rank;
    a.shard_dim = parameters.front().shard_dim == 1 ? 1 : -1;
    a.init_std = 1.0 / std::sqrt(3.0 * static_cast<double>(cols)); // PEFT's, which draws from +-1 / sqrt(k)
    std::vector<program::Parameter> b = parameters;
    for (program::Parameter& p : b) {
        p.name = stem(p) + ".lora_B.weight";
        p.cols = rank;
        p.shard_dim = p.shard_dim == 0 ? 0 : -1;
        p.init_std = 0.0;
    }
    declare(key, std::move(parameters), quantized, true, copies);
    adapters_ = true;
    declare(key + ".lora_a", {std::move(a)}, false, true, copies);
    declare(key + ".lora_b", std::move(b), false, true, copies);
    adapters_ = false;
}

// Megatron's bucket size: max(40 M, 1 M per rank of the group) elements.
std::int64_t ParameterSet::cut_elements(const program::Bucket& bucket) const {
    return std::max<std::int64_t>(40'000'000, 1'000'000 * static_cast<std::int64_t>(bucket.group_size));
}

void ParameterSet::boundary(int layer) {
    const bool behind_layer = layer_ >= 0;
    layer_ = layer;
    if (plan_.reshards()) {
        closed_.assign(closed_.size(), true);
        return;
    }
    if (!behind_layer || plan_.pp > 1) return; // The chunk is the bucket: its reduction runs under the other chunks.
    for (std::size_t i = 0; i < buckets_.size(); ++i)
        if (buckets_[i].decayed + undecayed_[i] >= cut_elements(buckets_[i])) closed_[i] = true;
}

program::TensorId add_flat(program::Program& program, std::string name, program::Dtype dtype, program::Storage storage,
                           std::int64_t elements, int chunk) {
    program::Tensor t;
    t.name = std::move(name);
    t.dtype = dtype;
    t.storage = storage;
    t.rows = elements;
    t.expected_rows = static_cast<double>(elements);
    t.chunk = chunk;
    program.tensors.push_back(std::move(t));
    return static_cast<program::TensorId>(program.tensors.size() - 1);
}

namespace {

// This rank's slice of a whole bucket, in place.
program::TensorId add_shard(program::Program& program, const program::Bucket& b, program::TensorId whole,
                            std::string name, program::Dtype dtype) {
    if (b.group_size == 1) return whole;
    const program::Storage storage = program.tensors[static_cast<std::size_t>(whole)].storage;
    const program::TensorId id = add_flat(program, std::move(name), dtype, storage, b.elements / b.group_size, b.chunk);
    program.tensors[static_cast<std::size_t>(id)].base = whole;
    program.tensors[static_cast<std::size_t>(id)].shard_group = b.group;
    return id;
}

} // namespace

void ParameterSet::seal(program::Program& program, bool named) {
    sealed_ = true;
    named_ = named;
    const program::Dtype act = activation_dtype(plan_.precision);
    const program::Dtype squares = plan_.optimizer.narrow() ? program::Dtype::bf16 : program::Dtype::f32;
    const bool fp8 = plan_.optimizer.moments == plan::Moments::fp8;
    const program::Dtype sums = gradient_dtype(plan_);
    // Optimizer states that are offloaded are on the device only while the optimizer runs.
    const program::Storage states =
        (plan_.offload & plan::offload::optimizer) != 0 ? program::Storage::activation : program::Storage::optimizer;
    if (plan_.steps_on_host()) add_host_scalars(program);
    const std::size_t base = program.buckets.size();
    const auto table = keys_.find("embedding");
    if (table != keys_.end() && copies_table(plan_))
        buckets_[static_cast<std::size_t>(table->second.bucket)].copy =
            program.pipeline_rank != table_holders(plan_).front();
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        program::Bucket& b = buckets_[i];
        const std::int64_t used = b.decayed + undecayed_[i];
        // 64 elements keep every shard aligned to 128 bytes in BF16.
        const std::int64_t unit = 64 * static_cast<std::int64_t>(b.group_size);
        b.elements = (used + unit - 1) / unit * unit;
        const std::int64_t own = b.elements / b.group_size;
        const std::string name = named ? fmt::format("chunk{}.bucket{}", chunk_, i) : std::string();
        const auto flat = [&](const char* what, program::Dtype dtype, program::Storage storage, std::int64_t n) {
            return add_flat(program, named ? name + what : std::string(), dtype, storage, n, chunk_);
        };
        const program::Dtype low = low_[i];
        const bool low_weights = program::is_quantized(low);
        const program::Dtype plain = low == program::Dtype::f32 ? low : act;
        if (b.frozen) {
            b.weights = b.weight_shard = flat(".weights", plain, program::Storage::parameter, b.elements);
            continue;
        }
        if (plan_.reshards() && b.group_size > 1) {
            b.weights = b.weight_shard = flat(".weights", plain, program::Storage::parameter, own);
            b.gradients = b.gradient_shard = flat(".gradients", sums, program::Storage::gradient, own);
        } else {
            // Quantized weights are kept row-wise and column-wise (GEMMs read both ways), the BF16 copy is not kept.
            b.weights = flat(".weights", low_weights ? low : plain, program::Storage::parameter,
                             low_weights ? 2 * b.elements : b.elements);
            b.gradients = flat(".gradients", sums, program::Storage::gradient, b.elements);
            b.gradient_shard = add_shard(program, b, b.gradients, name + ".gradient_shard", sums);
            const bool from_master = low == program::Dtype::fp8_block && plan_.blocks_by_rows();
            if (low_weights && !(from_master && b.group_size == 1)) {
                b.staging = flat(".staging", program::Dtype::bf16, program::Storage::gradient, b.elements);
                program.tensors[static_cast<std::size_t>(b.staging)].base = b.gradients;
                b.weight_shard = b.group_size == 1
                                     ? b.staging
                                     : add_shard(program, b, b.gradients, name + ".weight_shard", program::Dtype::bf16);
            } else if (!low_weights) {
                b.weight_shard = add_shard(program, b, b.weights, name + ".weight_shard", plain);
            }
        }
        const program::Dtype moments = fp8 ? program::Dtype::mxfp8 : squares;
        if (!plan_.steps_on_host()) {
            b.master = flat(".master", program::Dtype::f32, states, own);
            b.exp_avg = flat(".exp_avg", moments, states, own);
            if (!muon_[i]) b.exp_avg_sq = flat(".exp_avg_sq", squares, states, own);
        }
        if (const int bytes = plan_.optimizer_copy_bytes(); bytes > 0)
            b.copies = flat(".copies", program::Dtype::f32, program::Storage::activation, own * bytes / 4);
        if (low == program::Dtype::fp8_block && plan_.blocks_by_rows() && !b.resharded()) add_matrices(program, i);
        if (muon_[i]) add_muon(program, i);
        if ((plan_.offload & plan::offload::states) == 0) continue;
        b.host_master = flat(".host_master", program::Dtype::f32, program::Storage::host, own);
        b.host_exp_avg = flat(".host_exp_avg", moments, program::Storage::host, own);
        if (!muon_[i]) b.host_exp_avg_sq = flat(".host_exp_avg_sq", squares, program::Storage::host, own);
        if (plan_.steps_on_host()) {
            const auto like = [&](const char* what, program::TensorId of) {
                return flat(what, program.tensors[static_cast<std::size_t>(of)].dtype, program::Storage::host, own);
            };
            b.host_gradients = like(".host_gradients", b.gradient_shard);
            b.host_weights = like(".host_weights", b.weight_shard);
        }
        for (const program::TensorId id :
             {b.host_master, b.host_exp_avg, b.host_exp_avg_sq, b.host_gradients, b.host_weights})
            if (id != program::no_tensor) program.tensors[static_cast<std::size_t>(id)].per_micro_batch = false;
    }
    if (plan_.reshards()) add_buffers(program);
    program.buckets.insert(program.buckets.end(), buckets_.begin(), buckets_.end());
    if (named) list_parameters(program, static_cast<int>(base));
}

// What the host's step reads beside its operands, once for all chunks of the rank; no step, none of it. All are there
// whether rows may overflow or not, so that states lie in the same place where a step is run again.
void ParameterSet::add_host_scalars(program::Program& program) const {
    program::ProgramIo& io = program.io;
    if (io.host_norm != program::no_tensor || io.hyper == program::no_tensor) return;
    const auto add = [&](const char* name, std::int64_t elements) {
        const program::TensorId id = add_flat(program, name, program::Dtype::f32, program::Storage::host, elements);
        program.tensors[static_cast<std::size_t>(id)].per_micro_batch = false;
        return id;
    };
    io.host_norm = add("host_norm", 1);
    io.host_hyper = add("host_hyper", program.tensors[static_cast<std::size_t>(io.hyper)].elements());
    io.host_overflow = add("host_overflow", 1);
}

// One view of the source and one of both quantized forms for every key; see QuantizeAttr.
void ParameterSet::add_matrices(program::Program& program, std::size_t index) {
    program::Bucket& b = buckets_[index];
    std::vector<std::pair<std::int64_t, const std::string*>> order; // keys as they lie in the bucket
    for (const auto& [key, entry] : keys_)
        if (entry.bucket == static_cast<int>(index)) order.emplace_back(entry.offset, &key);
    std::sort(order.begin(), order.end());
    for (const auto& place : order) {
        const std::string* const key = place.second;
        const Key& entry = keys_.at(*key);
        const std::int64_t cols = parameters_[entry.first].local_cols, rows = entry.elements / cols;
        program::Bucket::Matrix m{program::no_tensor, program::no_tensor, entry.copies, rows / entry.copies, cols};
        const std::int64_t scales = program::QuantizeAttr{m.copies, m.n, m.k}.scales();
        // Everything lies where 16-byte accesses reach it, and the scales in what the bucket has for them.
        if (entry.offset % 256 != 0 || entry.elements % 256 != 0 || 8 * scales > entry.elements / 16)
            fail("{}: {} matrices of {} x {} behind {} elements have no place for their blocks", *key, m.copies, m.n,
                 m.k, entry.offset);
        const auto view = [&](program::TensorId base, const char* what, std::int64_t forms) {
            const program::Tensor whole =
                program.tensors[static_cast<std::size_t>(base)]; // The copy stays valid while tensors are added below.
            const program::TensorId id =
                add_flat(program, *key + what, whole.dtype, whole.storage, forms * rows, b.chunk);
            program::Tensor& t = program.tensors[static_cast<std::size_t>(id)];
            t.cols = cols;
            t.base = whole.base == program::no_tensor ? base : whole.base;
            t.offset = forms * entry.offset;
            return id;
        };
        m.source = view(b.group_size == 1 ? b.master : b.staging, ".plain", 1);
        m.value = view(b.weights, ".blocks", 2);
        if (b.one_scale && !plan_.keeps_scales())
            m.largest =
                add_flat(program, *key + ".largest", program::Dtype::f32, program::Storage::activation, 1, b.chunk);
        b.matrices.push_back(m);
    }
}

void ParameterSet::add_buffers(program::Program& program) {
    const program::Dtype act = activation_dtype(plan_.precision);
    const program::Dtype reduced = reduces_copy(plan_) ? program::Dtype::bf16 : gradient_dtype(plan_);
    // Buckets of one kind in layers of even or odd places share their buffers: the next layer's weights arrive while
    // this one computes, and no sooner. The ends of the model have their own.
    using Turn = std::tuple<plan::Domain, std::uint16_t, program::Dtype, int>;
    std::map<Turn, std::vector<std::size_t>> turns;
    int place = 0, last_layer = -1;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
        const program::Bucket& b = buckets_[i];
        if (b.layer >= 0 && b.layer != last_layer) ++place, last_layer = b.layer;
        const int turn = b.layer >= 0 ? place % 2 : 2 + static_cast<int>(i);
        if (b.group_size > 1) turns[{b.domain, b.cut, low_[i], turn}].push_back(i);
    }
    for (const auto& [turn, members] : turns) {
        std::int64_t most = 0;
        for (const std::size_t i : members) most = std::max(most, buckets_[i].elements);
        const program::Dtype low = std::get<program::Dtype>(turn);
        const bool low_weights = program::is_quantized(low);
        const program::Dtype plain = low == program::Dtype::f32 ? low : act;
        const std::string name = fmt::format("chunk{}.turn{}", chunk_, members.front());
        const program::TensorId gathered =
            add_flat(program, name + ".gathered", low_weights ? low : plain, program::Storage::activation,
                     low_weights ? 2 * most : most, chunk_);
        const program::TensorId whole_gradients =
            add_flat(program, name + ".whole_gradients", reduced, program::Storage::activation, most, chunk_);
        for (const std::size_t i : members) {
            program::Bucket& b = buckets_[i];
            b.gathered = gathered;
            b.whole_gradients = whole_gradients;
            if (low_weights)
                b.staging = add_flat(program, fmt::format("chunk{}.bucket{}.staging", chunk_, i), program::Dtype::bf16,
                                     program::Storage::activation, b.elements, chunk_);
        }
    }
}

} // namespace moe::emit
