// The weights that a chunk holds: their names, shards and places in flat buckets, one bucket per gradient group.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/program.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moe::emit {

struct Weight;

// Declared first, segment by segment; seal() then cuts buckets and creates their tensors; views come last. Parameters
// declared under one key lie next to each other, so that q|k|v or gate|up of every expert are one matrix to a GEMM
// while checkpoints keep the Hugging Face names.
class ParameterSet {
public:
    // Weights that `lender`, a chunk of the same rank, has declared (the embedding table at the open end of a V, or
    // where MTP came to lie) are shared with it: one weight, one gradient. Megatron-LM's interleaved chunks are models
    // of their own.
    ParameterSet(const plan::Plan& plan, int chunk, ParameterSet* lender = nullptr)
        : plan_(plan),
          chunk_(chunk),
          shared_with_(plan::in_a_v(plan.schedule) || plan::stack_traits(plan).shares_weights_of_chunks ? lender
                                                                                                        : nullptr) {}

    // All of one key share domain and whether they are quantized. Those that are cut over another axis than the first
    // (Parameter::cut) lie under key + beside, as if they were declared there. `decay` false: norms and biases.
    // `copies`: the same parameters once for every local expert, one expert's behind the other's. `precision`: what
    // they are quantized to where that is not the plan's choice for their domain; fp32: they stay FP32.
    void declare(const std::string& key, std::vector<program::Parameter> parameters, bool quantized, bool decay = true,
                 int copies = 1, std::optional<machine::Precision> precision = {});
    // As declare(), of matrices beside which Plan::lora may put adapters of a target: A [rank, k] under key + ".lora_a"
    // and B [n, rank] under key + ".lora_b", named as PEFT names them. With adapters all that declare() is given is
    // frozen.
    void declare_adapted(unsigned target, const std::string& key, std::vector<program::Parameter> parameters,
                         bool quantized, int copies = 1);
    // Declares that the weights that follow belong to decoder layer `layer`, -1 for the ends of the model. Behind a
    // layer, a bucket that has grown past the cut size ends (PP = 1 only, where finer buckets overlap); under FSDP
    // every bucket does.
    void boundary(int layer);
    // Says whether the weights that follow are of a layer that is not quantized.
    void keep_bf16(bool keep) { bf16_ = keep; }
    // `named` false leaves Program::parameters empty and tensors without names: sizes need none.
    void seal(program::Program& program, bool named = true);
    bool has(const std::string& key) const { return keys_.count(key) > 0 || (shared_with_ && shared_with_->has(key)); }
    // Elements of a key that has been declared on this rank, 0 of one that has not.
    std::int64_t elements(const std::string& key) const;
    const plan::Plan& plan() const { return plan_; }

    static constexpr const char* beside = ".beside";

    // View of a key's parameters as [n, k]; frozen ones have no gradient. Error (failure) if the sizes disagree, which
    // would be a fault of an emitter.
    Weight weight(program::Program& program, const std::string& key, std::int64_t n, std::int64_t k);

    bool decays(const std::string& key) const; // of declare()

    // Buckets before tensors exist: what bucket_sizes() reports.
    const std::vector<program::Bucket>& buckets() const { return buckets_; }

private:
    struct Key {
        int bucket = -1;
        bool decay = true;
        std::int64_t offset = 0; // offset within the decayed or the undecayed part
        std::int64_t elements = 0;
        std::size_t first = 0, count = 0; // range in parameters_: matrices of one width
        int copies = 1;
        std::map<std::pair<std::int64_t, std::int64_t>, std::pair<program::TensorId, program::TensorId>> views;
    };
    void add_buffers(program::Program& program); // adds buffers of resharded buckets
    void add_host_scalars(program::Program& program) const;
    void add_matrices(program::Program& program, std::size_t index); // adds matrices of a bucket quantized in blocks
    void list_parameters(program::Program& program, int first_bucket) const;
    int bucket_for(plan::Domain domain, std::uint16_t cut, bool quantized, program::Dtype low, bool muon, bool frozen,
                   bool one_scale);
    void add_muon(program::Program& program, std::size_t index); // what Muon does with a bucket, and works in
    std::int64_t cut_elements(const program::Bucket& bucket) const;

    const plan::Plan& plan_;
    int chunk_;
    ParameterSet* shared_with_;
    int layer_ = -1;
    bool sealed_ = false, named_ = true, bf16_ = false, adapters_ = false;
    std::vector<program::Parameter> parameters_;
    std::vector<program::Bucket> buckets_;
    std::vector<bool> closed_, muon_;
    std::vector<program::Dtype> low_; // dtypes of weights as products read them; bf16: as they are
    std::vector<std::int64_t> undecayed_;
    std::map<std::string, Key> keys_;
};

// A flat tensor of a Program.
program::TensorId add_flat(program::Program& program, std::string name, program::Dtype dtype, program::Storage storage,
                           std::int64_t elements, int chunk = -1);

// Pipeline ranks that hold a copy of the embedding table, in order: the first stage, that of MTP, and the last where
// the head is tied to the table. Two or more have to add their gradients to each other's.
std::vector<int> table_holders(const plan::Plan& plan);
// True where the table has several holders and the stack is ours.
bool copies_table(const plan::Plan& plan);
// True where, besides, the table is trained: our stack adds up only the shards of the optimizer; the published ones add
// up whole gradients (Megatron-LM's embedding group).
bool shares_table(const plan::Plan& plan);

// True where a BF16 copy of FP32 sums is reduced (StackTraits::reduces_bf16_copy).
bool reduces_copy(const plan::Plan& plan);
// In which a rank sums its gradients.
program::Dtype gradient_dtype(const plan::Plan& plan);
// Ranks that hold the same shard of a domain's weights (HSDP); axes 0 where every shard is held once.
plan::Group replica_group(const plan::Plan& plan, plan::Domain domain);
// Group that a parameter's gradient is scattered over: the complement inside its domain of the axis `cut` that shards
// it, 0 where none does.
plan::Group gradient_group(const plan::Plan& plan, plan::Domain domain, std::uint16_t cut);

} // namespace moe::emit
