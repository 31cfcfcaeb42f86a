// The Program: one training step of one kind of rank as data, read alike by the simulator and by the engine.
//
// A Program is templates (the ops of one model chunk's forward, backward or half of it, or of the optimizer) and a list
// of slots (which template runs next, for which micro-batch). Ranks that differ only in their peers share one Program:
// groups are named by axes, and whatever depends on a rank's position is looked up when an op runs. Op id = (slot,
// index in template).
#pragma once

#include "planner/plan/schedule.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe::program {

// How a weight starts.
enum class Init : std::uint8_t {
    normal,     // deviates of a standard deviation
    ones,       // a norm's weight
    log_counts, // ln(1 + element): rates of Mamba-2's heads (transformers 5.24, modeling_nemotron_h.py)
    steps,      // x with softplus(x) spread evenly, by its logarithm, from 0.001 to 0.1: steps of its heads (the same)
};

// A weight by its Hugging Face name. Local shape = global with shard_dim divided by the shard axis' degree.
struct Parameter {
    std::string name;      // "{}" stands for the global expert index
    int local_expert = -1; // expert parameters: global index = ep coordinate * experts per rank + local_expert
    plan::Domain domain = plan::Domain::dense;
    std::int64_t rows = 0, cols = 1; // global shape of the matrix (vectors: cols = 1)
    int shard_dim = -1;              // -1 replicated, 0 rows, 1 columns; over `cut`
    // The axis of its domain over which it is sharded: TP (dense) or ETP (expert); of keys and values that several TP
    // ranks hold, TP's key_parts.
    std::uint16_t cut = plan::axis::tensor;
    std::int64_t padded_rows = 0; // embedding and head: rows after padding to the TP degree; = rows otherwise
    Init init = Init::normal;
    double init_std = 0.02; // of normal deviates; 0: zeros
    bool copy = false;      // another pipeline rank holds the same weight and speaks for it (tied embeddings)
    int bucket = -1;
    std::int64_t offset = 0; // place of the local slice in its bucket, elements
    std::int64_t local_rows = 0, local_cols = 1;
    std::int64_t local_elements() const { return local_rows * local_cols; }
};

// Parameters of one chunk that share a gradient group: one flat buffer each of weights, gradients and optimizer shards.
// The group is the complement of the axes that shard the weights inside their domain (ZeRO-1 over exactly that group).
struct Bucket {
    plan::Domain domain = plan::Domain::dense;
    plan::Group group; // axes 0 when its size is 1
    int group_size = 1;
    std::uint16_t cut = 0; // the axis over which its weights are sharded inside their domain, see Parameter; 0: none
    // Ranks that hold the same elements: HSDP's copies of a shard, or all that hold frozen weights; axes 0: none does.
    plan::Group replicas;
    int chunk = 0;
    std::int64_t elements = 0; // padded to a multiple of group_size
    std::int64_t decayed = 0;  // [0, decayed) take weight decay, the rest (norms, biases) does not
    bool copy = false;         // another pipeline rank counts these weights in the norm
    // Weights that no step changes (Plan::lora): they have neither gradients nor states, and their `group` is one
    // rank. Those of the first rank of `replicas` go into checkpoints.
    bool frozen = false;
    bool quantizable = false; // holds matrices that low precisions quantize, which lie apart from everything else
    // weights: the whole bucket in storage precision; after the optimizer only this rank's slice is new, and the begin
    // slot of the next step gathers the rest (so the gather can run under the first forward). master is the truth.
    TensorId weights = no_tensor, gradients = no_tensor; // gradients: the whole bucket, partial sums of this rank
    TensorId gradient_shard = no_tensor; // own slice of gradients (in place), = gradients when group_size is 1
    TensorId weight_shard = no_tensor;   // own slice of weights (in place), = weights when group_size is 1
    // Quantized buckets only: BF16 view of the gradient buffer, free between the optimizer and the first backward,
    // through which new weights are gathered before they are quantized; weight_shard is then a slice of it. Where
    // `matrices` are quantized, the step starts by rounding master into it (a group of one rank has neither).
    TensorId staging = no_tensor;
    // [elements / group_size]; Muon has no exp_avg_sq.
    TensorId master = no_tensor, exp_avg = no_tensor, exp_avg_sq = no_tensor;
    TensorId copies = no_tensor; // FP32, of what finish reads: Plan::optimizer_copy_bytes()
    // Offloaded optimizer states wait here between steps; those above are then on the device only in finish.
    TensorId host_master = no_tensor, host_exp_avg = no_tensor, host_exp_avg_sq = no_tensor;
    // Where the host steps (Plan::steps_on_host), there are none above: the gradient's shard comes here, and the new
    // weights go from here.
    TensorId host_gradients = no_tensor, host_weights = no_tensor;
    bool steps_on_host() const { return host_gradients != no_tensor; }
    // Whether a step sums this shard's gradients over the ranks that hold it.
    bool sums_copies() const { return !frozen && replicas.axes != 0; }
    // Frozen weights are their own master, in the precision of activations.
    TensorId kept_master() const { return frozen ? weights : host_master == no_tensor ? master : host_master; }
    // FSDP (Plan::reshards) and a group of several ranks: weights and gradients above are only this rank's shards; the
    // templates gather the whole weights and write whole gradients into these activations, which layers take turns with
    // (kept from forward to backward outside of decoder layers). staging then is where BF16 weights arrive.
    TensorId gathered = no_tensor, whole_gradients = no_tensor;
    // FP8 in blocks as our kernels read it (Plan::blocks_by_rows()): the matrices of the bucket, each quantized at the
    // start of a step from `source`, this rank's master where the group is one rank, else what staging has gathered.
    struct Matrix {
        TensorId source = no_tensor, value = no_tensor;
        int copies = 1; // local experts
        std::int64_t n = 0, k = 0;
        // Of buckets of one_scale: where the largest magnitude is found, [1], or the slot of delayed scaling.
        TensorId largest = no_tensor;
        int slot = -1;
    };
    std::vector<Matrix> matrices;
    bool one_scale = false; // fp8-tensor: each of the matrices has one
    // optimizer = muon: its matrices, the only weights of the bucket, each with one moment (exp_avg) and no exp_avg_sq.
    struct Muon {
        struct Matrix { // `copies` of it, one for each local expert, `stride` elements apart
            std::int64_t offset = 0, stride = 0;
            int copies = 1;
            std::int64_t rows = 0, cols = 1; // local slice
            int shard_dim = -1;              // of the whole matrix over `parts` ranks; -1: the slice is whole
        };
        std::vector<Matrix> matrices;
        int parts = 1;           // ranks of tensor parallelism over which matrices are sharded
        std::int64_t halo = 0;   // elements of the largest slice
        std::int64_t window = 0; // elements around a shard that hold every slice which it touches
        MuonAttr attr;           // what Newton-Schulz multiplies
        // A window of updates in the dtype of Newton-Schulz, of this rank and of all `parts`, where there are several.
        // work: two whole matrices and three squares of their short side. norm [1].
        TensorId collected = no_tensor, updates = no_tensor, work = no_tensor, norm = no_tensor;
    };
    Muon muon;
    bool is_muon() const { return !muon.matrices.empty(); }
    int moments() const { return frozen ? 0 : is_muon() ? 1 : 2; } // that AdamW or Muon keeps
    int layer = -1; // FSDP: the decoder layer that the bucket belongs to, -1 for the ends of the model
    bool resharded() const { return gathered != no_tensor; }
};

struct Template {
    plan::SlotKind kind{};
    int chunk = -1;
    std::vector<Op> ops;
};

struct Slot {
    int index = 0;       // into Program::templates
    int micro_batch = 0; // begin, finish: 0
    int merge = -1;      // into Program::merges: a forward beside which the slot behind it, a backward, runs
};

// EP overlap: in which order one rank runs the ops of a forward and of the backward beside it.
struct Merge {
    int forward = 0, backward = 0;   // templates
    std::vector<bool> from_backward; // by op of both: the backward's; ops of either keep their order
    // Multiprocessors, by op of both, that a product leaves to the tokens on their way over peer memory beside it.
    std::vector<std::uint8_t> reserved_sms;
};

// The tensors that one MoE layer leaves behind for the end of the step; only where Plan::router or the stack counts
// loads.
struct RouterIo {
    int layer = 0;
    int experts = 0;
    TensorId load = no_tensor;       // [E] f32: copies sent to each expert, of the whole group of samples after finish
    TensorId loss = no_tensor;       // [2] f32: auxiliary loss and z-loss, likewise
    TensorId score_load = no_tensor; // global_aux_loss: n(e) of this step, likewise
    TensorId last_load = no_tensor;  // global_aux_loss: input, score_load of the step before
    TensorId bias = no_tensor;       // bias_update: view of the selection bias
};

// What a layer with an indexer leaves behind for the end of the step, where indexers are trained.
struct IndexerIo {
    int layer = 0;
    TensorId loss = no_tensor; // [1] f32: its loss, coefficient included, of the whole group of samples after finish
};

// A linear layer whose operands have scales of their history (fp8_scaling = delayed): three places, one behind the
// other, in the windows and largest magnitudes of ProgramIo, by RoundAttr::Role. Experts of a layer share them.
struct ScaledIo {
    int layer = 0;
    std::string name; // of the linear layer within it, the same under every plan
};
inline constexpr int scaled_roles = 3;

// Scalars and inputs that the trainer reads and writes by role.
struct ProgramIo {
    // labels[i] is the token behind position i; mtp_labels[d] that d + 1 positions further on, -1 beyond the sample.
    TensorId ids = no_tensor, labels = no_tensor, positions = no_tensor;
    std::vector<TensorId> mtp_labels;
    // Plans that mask documents, by row: the token's position in its document, and the position in the sequence at
    // which the document of attention's query begins. Of each depth of labels [1]: those that there would be without
    // masks over those that count in the whole global batch, 0 where none does.
    TensorId document_positions = no_tensor, document_starts = no_tensor;
    TensorId sequence_starts =
        no_tensor;                     // where the document of each row of whole sequences begins: layers with a state
    TensorId chunk_starts = no_tensor; // where the chunk of each row's query begins, or its document if that is later
    std::vector<TensorId> label_shares;
    // Plans with input_jitter or with gradients that are rounded stochastically, [3] by micro-batch: the lower and the
    // upper half of the key of this step's noise, and the number within the step of the micro-batch's first sequence.
    TensorId noise = no_tensor;
    TensorId mtp_loss = no_tensor; // sum over MTP layers of their mean cross-entropy, without weight
    std::vector<RouterIo> routers;
    std::vector<IndexerIo> indexers;
    TensorId layer_sums = no_tensor; // routers' load, loss and score_load and indexers' losses, one behind the other
    // Delayed scaling, [scaled_roles * scaled.size()] f32 each: input, the largest magnitudes of the steps before, 0
    // where there are none; those of this step, over all ranks of the stage after finish.
    std::vector<ScaledIo> scaled;
    TensorId scale_windows = no_tensor, scale_largest = no_tensor;
    // Generation (lower_forward): the last slot's logits [S, V/tp], in place of a loss.
    TensorId logits = no_tensor;
    TensorId loss = no_tensor;          // summed over the step, already divided by the global token count
    TensorId gradient_norm = no_tensor; // square of the global norm after finish
    // Plans whose routed rows may overflow: rows too many, over all layers and ranks after finish. Above 0 the step has
    // changed no weight and must be run again (planner/memory/retry_memory.hpp).
    TensorId overflow = no_tensor;
    TensorId step_sums = no_tensor; // gradient_norm, and overflow behind it: summed over all ranks at once
    // Segments (lower_segment): what the neighbours send, the input of the forward and the gradient of its output.
    TensorId segment_in = no_tensor, segment_dout = no_tensor;
    TensorId segment_message(int direction) const { return direction == 0 ? segment_in : segment_dout; } // 1: backward
    // Where the host steps: its copies of gradient_norm, hyper and overflow.
    TensorId host_norm = no_tensor, host_hyper = no_tensor, host_overflow = no_tensor;
    TensorId hyper = no_tensor; // [9]: lr, beta1, beta2, eps, weight decay, clip, 1-beta1^t, 1-beta2^t, largest norm^2
};

struct Program {
    int pipeline_rank = 0;
    std::vector<Tensor> tensors;
    std::vector<Template> templates;
    std::vector<Slot> slots;
    std::vector<Parameter> parameters;
    std::vector<Bucket> buckets;
    std::vector<plan::Stage> chunks; // stages by chunk
    std::vector<int> in_flight;      // micro-batches by chunk
    std::vector<Merge> merges;       // EP overlap, one for every two templates that run side by side
    ProgramIo io;
};

// A tensor like `id` (Tensor::again_of) that the backward fills again.
TensorId repeat_tensor(Program& program, TensorId id);

// Goes through a Program's ops in the order in which one rank (a thread, a queue) runs them: slot by slot, merged slots
// together.
class OpWalk {
public:
    explicit OpWalk(const Program& program) : program_(&program) { settle(); }
    bool done() const { return first_ >= program_->slots.size(); }
    std::size_t slot_number() const { return first_ + (backward_ ? 1 : 0); } // into Program::slots
    std::size_t index() const { return at_[backward_ ? 1 : 0]; }             // into the slot's template
    const Slot& slot() const { return program_->slots[slot_number()]; }
    const Template& ops() const { return program_->templates[static_cast<std::size_t>(slot().index)]; }
    const Op& op() const { return ops().ops[index()]; }
    bool merged() const { return program_->slots[first_].merge >= 0; } // another slot's ops run beside it
    int reserved_sms() const; // multiprocessors that the op leaves to tokens on their way beside it
    void next() {
        ++at_[backward_ ? 1 : 0];
        settle();
    }

private:
    void settle();
    const Merge& merge() const { return program_->merges[static_cast<std::size_t>(program_->slots[first_].merge)]; }

    const Program* program_;
    std::size_t first_ = 0;      // slot, or the forward of two merged ones
    std::size_t at_[2] = {0, 0}; // next op of it and of the backward beside it
    bool backward_ = false;
};

} // namespace moe::program
