// Training with exactly one plan: a rank per thread of one process, or per process, each with its arena, stepping
// through its Program.
#pragma once

#include "engine/comm/processes.hpp"
#include "engine/comm/queued.hpp"
#include "engine/comm/threads.hpp"
#include "engine/run/executor.hpp"
#include "engine/train/bad_steps.hpp"
#include "engine/train/checkpoint_writer.hpp"
#include "engine/train/router_replay.hpp"
#include "engine/train/scale_history.hpp"
#include "engine/train/train_options.hpp"
#include "engine/train/weight_average.hpp"
#include "engine/weights/parameters.hpp"
#include "planner/lower/lower.hpp"
#include "planner/lower/passes/keep_routing.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace moe::train {

// The work of a layer's router in a step, over the whole global batch.
struct RouterStep {
    int layer = 0;                       // number of the layer in the model; MTP layers come behind the model's
    double aux_loss = 0.0, z_loss = 0.0; // losses with their coefficients; 0 where the plan has none
    std::vector<std::int64_t> tokens;    // tokens sent to each expert
    std::vector<double> bias = {};       // selection biases behind the step, where the plan moves them
    double bias_spread() const;          // largest bias less the smallest, 0 without any
    double max_over_mean() const;        // most tokens of an expert over the mean; 1 = balanced
    // Entropy of the loads over that of even ones: 1 = even, 0 = one expert has all; 1 where nothing is sent.
    double load_entropy() const;
};

// The loss of a layer's indexer in a step, over the whole global batch: its coefficient times the mean over tokens of
// the divergence between what the heads of attention see together and the indexer's softmax.
struct IndexerStep {
    int layer = 0; // as RouterStep's
    double loss = 0.0;
};

// What attention's logits were in a step, over the whole global batch and all heads, and what QK-clip did about it.
struct LogitStep {
    double largest = 0.0; // softmax' scale included
    int clipped = 0;      // query heads whose weights were scaled
};

struct StepResult {
    std::int64_t step = 0;  // number of the step, from 1
    double loss = 0.0;      // mean cross-entropy over the global batch before the update, nats per token
    double grad_norm = 0.0; // norm of the global gradient before clipping
    double lr = 0.0;
    double seconds = 0.0;
    std::int64_t tokens = 0;
    double mtp_loss = 0.0; // mean over MTP layers of their cross-entropy, without weight; 0 without MTP
    // Routed rows, over all layers and ranks, for which the planned capacity had no place. Above 0 the step was run a
    // second time with the worst case's buffers, whose results these are.
    double overflow = 0.0;
    bool skipped = false; // a bad step, which changed nothing
    // Steps of the routers, by layer, at process 0. Programs of our stack count loads where they run; of others, loads
    // that no loss or bias needs are known on the CPU in one process alone.
    std::vector<RouterStep> routers;
    std::vector<IndexerStep> indexers = {}; // by layer, at process 0, where the plan trains indexers
    std::optional<LogitStep> logits = {};   // with options.qk_clip
    double aux_loss() const;                // sum over layers of the routers' losses, auxiliary and z
};

// The loss of weights as they are over samples that they are not trained on.
struct Evaluation {
    double loss = 0.0;       // mean cross-entropy over tokens, nats
    std::int64_t tokens = 0; // labels that there were
};

// Writes seq + 1 tokens of a sample; samples of a step are those behind the ones of the step before. In an evaluation
// -1 stands behind the last token of a sample that is shorter.
struct SampleSource {
    using Write = std::function<void(std::int64_t sample, std::span<std::int32_t> out)>;
    Write tokens;
    // Where the document of each token begins in the sample, for plans that mask documents; none: a sample is one.
    Write documents;
    // 1 for each token that is a label where it stands, else 0: the loss is over those; none: all are. A step needs a
    // plan that masks documents, an evaluation does not.
    Write counts;

    template <class F, class = std::enable_if_t<std::is_constructible_v<Write, F>>>
    SampleSource(F write) : tokens(std::move(write)) {} // NOLINT(google-explicit-constructor): most have tokens alone
    SampleSource(Write write, Write starts, Write labels = {})
        : tokens(std::move(write)), documents(std::move(starts)), counts(std::move(labels)) {}
    void operator()(std::int64_t sample, std::span<std::int32_t> out) const { tokens(sample, out); }
};

class Trainer {
public:
    // Lowers and checks the plan, allocates every arena and sets initial weights. Throws Error.
    Trainer(const plan::Plan& plan, const TrainOptions& options);
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    // Throws Error (bad_input) for a source with counts under a plan that does not mask documents.
    StepResult step(const SampleSource& source);
    // Throws Error (bad_input), by file and field, where the steps from the next one to the last of options.steps
    // cannot be replayed from options.replay_routing; step() does so before the first.
    void check_replay() const;
    // The loss over the samples [0, samples), in batches of the plan's, of which the last may be filled up. Nothing
    // that a later step reads changes: it gives the bits that it gives without. Called by all processes, between steps;
    // only with options.evaluates or options.forward_only.
    Evaluation evaluate(const SampleSource& source, std::int64_t samples);
    // The logits [vocab] of the token behind `token`, which stands at `position`; positions are given in order from 0,
    // and all below options.forward_only's cached keys. Of one rank with sequences of one token.
    std::vector<float> decode(std::int32_t token, std::int64_t position);
    // Records every step from now on. On devices only the last of options.steps are recorded otherwise, because that
    // costs time.
    void record_from_now() { first_timed_ = std::min(first_timed_, done_); }

    // Global tensors by Hugging Face name, row-major [rows, cols]: the gradient of the last step (summed over ranks,
    // before clipping), the FP32 master weights, and setting weights. Between steps only. Throws Error (bad_input) for
    // a name the model does not have.
    struct Shape {
        std::int64_t rows = 0, cols = 1;
    };
    const std::map<std::string, Shape>& parameters() const { return shapes_; }
    // Muon leaves its update in the place of a matrix' gradient.
    std::vector<float> read_gradient(const std::string& name) const;
    std::vector<float> read_weight(const std::string& name) const;
    std::vector<float> read_average(const std::string& name) const; // of a run with options.ema
    void write_weight(const std::string& name, std::span<const float> values);
    // Sets a weight without a copy of the whole: read(first, out) delivers the elements [first, first + out.size()) of
    // the global tensor that some rank holds, in runs of at most 2^20.
    void fill_weight(const std::string& name,
                     const std::function<void(std::int64_t first, std::span<float> out)>& read);
    const plan::Plan& plan() const { return plan_; }
    const WeightRules& rules() const { return options_.rules; }
    bool delays_scales() const;                            // operands of some stage have scales of their history
    const ScaleHistory& scales() const { return scales_; } // behind the last step; of all stages in process 0

    // Copies what a checkpoint holds; `out` is used again, so that only the first copy allocates. Between steps only.
    void snapshot(weights::Snapshot& out) const;
    // Goes on where the checkpoint of any plan of the same model stands. Throws Error (bad_input) where its parameters
    // are not this model's. What else must agree: check_resume() of resume.hpp.
    void restore(const weights::StoredCheckpoint& checkpoint);
    // The same to a checkpoint of this run, and on with the samples behind those that were taken: other data than those
    // that led here.
    void go_back(const weights::StoredCheckpoint& checkpoint);

    // True where any process says so. Called by all processes in turn with steps.
    bool any(bool here) const;

    // The timeline of the run. Where there are several processes, the one of rank 0 has the rows, and the tokens below,
    // of all; all of them must call. Rows of the recorded step whose duration is the median of the last kept ones (the
    // first step, which touches memory for the first time, is left out when there are others).
    program::Timeline timeline() const;
    // Largest arena of a rank; on a device that can tell, all that is taken there, which counts context and libraries.
    double memory_gib() const;
    double average_gib() const; // average of the weights in the host's memory, of the fullest rank here
    double arena_gib() const;   // planned size of the arena, GiB
    // Tokens that were sent to each expert over all steps: [MoE layer][expert]; empty where steps do not tell.
    std::vector<std::vector<std::int64_t>> routed_tokens() const;
    bool recorded() const { return done_ > std::max({first_timed_, begun_, first_full_}); } // timeline() has a step
    int permits() const { return cores_->permits(); }
    std::string device_name() const;          // name of the devices, with their number where there are several
    device::PowerSample power_sample() const; // power of the devices here
    device::QueuedStep queued_step() const;   // step of the first rank here; all zero on back ends without a queue
    // The library that joins ranks on devices; empty elsewhere.
    const comm::Joined& joined() const { return joined_; }
    std::int64_t steps_done() const { return done_; }
    std::int64_t steps_taken() const { return done_ - begun_; } // steps that this process has taken
    const run::Recorder& recorder(int rank) const { return *ranks_[static_cast<std::size_t>(rank)].recorder; }
    const std::vector<program::Program>& programs() const { return programs_; }

private:
    // What runs a second Program in the arena of a rank's step.
    struct Beside {
        std::unique_ptr<device::Arena> arena;
        std::unique_ptr<run::Executor> executor;
        std::unique_ptr<run::Recorder> recorder;
    };
    struct Rank {
        std::unique_ptr<device::Device> device; // The device outlives the arena.
        std::unique_ptr<device::Arena> arena;
        std::unique_ptr<comm::Communicator> communicator;
        std::unique_ptr<run::Executor> executor;
        std::unique_ptr<run::Recorder> recorder;
        Beside rerun; // a step again that overflowed; null where none can be
        WeightAverage average;
        Beside forward;                         // an evaluation; null where there is none
        std::map<std::int64_t, Beside> smaller; // steps by their batch, while it ramps up
        std::vector<weights::LocalParameter> parameters;
        std::vector<std::int32_t> positions; // positions of this rank's tokens in their sequence
        std::vector<std::int32_t> sequence;  // those of whole sequences
        std::vector<std::int32_t> queries;   // those of attention's rows, where documents are masked
        std::vector<std::int32_t> tokens;    // tokens of one micro-batch, on their way to the device
        int rank = 0, stage = 0, data = 0;   // stage, data: coordinates along PP and DP
    };
    struct Holder {    // holder of pieces of a global tensor
        int place = 0; // index in ranks_
        std::size_t parameter = 0;
    };

    const program::Program& program_of(const Rank& rank) const {
        return programs_[static_cast<std::size_t>(rank.stage)];
    }
    comm::Transport* transport() const { return options_.transport; }
    int stage_of_rank(int rank) const;
    void build_rank(Rank& rank, int place, const std::vector<memory::MemoryPlan>& memory);
    void start_rank(Rank& rank);
    void build_beside(Rank& rank, const program::Program& program, Beside& beside) const;
    void run_beside(Beside Rank::*beside);
    void lower_evaluation();
    std::vector<std::vector<passes::KeptRouting>> keep_routing(std::vector<program::Program>& programs,
                                                               bool replay) const;
    RoutedStep routed_step(std::int64_t step, std::int64_t samples) const;
    void load_routing();
    void write_routing(Rank& r);
    void record_routing() const;
    // Calls visit(row of this rank's tokens, row of the global batch) for every token of a micro-batch.
    template <class Visit>
    void for_each_token(int rank, int micro_batch, Visit visit) const;
    // Positions of the tokens of a rank, and of a member's tokens where so many share a sequence.
    std::vector<std::int32_t> positions_of(int rank) const;
    std::vector<std::int32_t> positions_of(int member, int members) const;
    void run_forward();
    void prepare_batch();
    void run_step(bool timed);
    void take_samples(const SampleSource& source, std::int64_t first, std::int64_t end);
    int micro_batches() const { return static_cast<int>(batch_ / (plan_.mbs * plan_.dp)); } // of the current step
    int device_of(int place) const;
    void join_devices(const std::vector<memory::MemoryPlan>& memory);
    std::vector<comm::MeetingPoint> meeting_points(std::size_t count) const;
    double overflow() const; // overflowing rows of the step just done
    void run_again();
    void index_parameters();
    void restore_average(const weights::StoredCheckpoint& checkpoint);
    std::vector<std::vector<ops::ShardPart>> parts_of_buckets(const Rank& rank) const;
    void run_ranks(const std::function<void(Rank&, int place)>& job);
    template <class Talk>
    auto among_processes(Talk talk) const;
    template <class T>
    std::vector<std::vector<T>> gathered(const std::vector<T>& mine) const; // vectors by rank, at rank 0
    void begin_rank(Rank& rank);
    void fill_inputs(Rank& rank);
    // Tokens of a micro-batch `ahead` positions behind those of the rank's rows, -1 beyond the sample or the document.
    void write_tokens(Rank& r, program::TensorId input, int micro_batch, std::int64_t ahead);
    // Whether the token `ahead` of a position is a label there: it counts and is of the same document.
    bool labels(std::int64_t sample, std::int64_t position, std::int64_t ahead) const;
    void count_labels(); // label_shares_ of the samples that are there
    // One int32 for each of the given positions of a micro-batch's sequences: value(sample of the step, position).
    template <class Value>
    void write_rows(Rank& r, program::TensorId input, int micro_batch, std::span<const std::int32_t> positions,
                    Value value);
    void write_noise(Rank& r); // of a plan that asks for it, for all micro-batches
    void write_chunks(Rank& r, int micro_batch);
    void write_documents(Rank& r, int micro_batch);
    std::array<double, 3> step_sums() const; // loss, square of the gradients' norm, sum of MTP's losses
    void count_routed(const std::vector<std::vector<std::int64_t>>& routed, std::map<int, RouterStep>& steps) const;
    void gather_routers(std::map<int, RouterStep>& steps);
    double read_scalar(const Rank& rank, program::TensorId id) const;
    bool counts_load() const; // the Programs do
    std::vector<RouterStep> read_routers(bool again);
    std::vector<double> read_bias(int layer, std::size_t experts) const;
    std::vector<IndexerStep> read_indexers() const;
    void write_windows(Rank& r) const;
    void keep_largest(); // of the step just done
    void add_largest(int stage, std::span<const float> values);
    bool any_indexer() const;
    void read_router_sums(const Rank& rank, std::map<int, RouterStep>& steps);
    const run::Executor& executor_of_step(const Rank& rank, bool again) const;
    std::vector<std::vector<float>> largest_logits(bool again) const;
    LogitStep clip_heads(bool skipped, bool again);
    void set_hyper(double lr);
    std::vector<std::vector<std::int64_t>> routed_in_step(bool again) const; // dense layers have empty vectors
    template <class Visit>
    void for_each_piece(const std::string& name, Visit visit) const;
    std::vector<float> assemble(
        const std::string& name,
        const std::function<void(const Rank&, const program::Bucket&, const weights::Piece&, float* to)>& read) const;

    plan::Plan plan_;
    TrainOptions options_;
    plan::Mesh mesh_;
    const ops::Backend* backend_ = nullptr;
    std::vector<program::Program> programs_; // programs by pipeline rank
    std::vector<program::Program> reruns_;   // programs of steps that are run again; empty where none can be
    std::vector<program::Program> forwards_; // programs of evaluations; empty where there are none
    std::map<std::int64_t, std::vector<program::Program>> smaller_; // programs of smaller batches
    std::vector<std::vector<passes::KeptRouting>> kept_routing_;    // by pipeline rank; empty without router replay
    std::map<int, RoutedLayer> replayed_; // by layer, of the step under way; empty where none is replayed
    bool replay_checked_ = false;
    std::unique_ptr<engine::Cores> cores_;
    std::unique_ptr<comm::ThreadFabric> fabric_;
    std::unique_ptr<comm::QueuedFabric> queued_fabric_; // stands in place of fabric_ where ranks have devices
    comm::Joined joined_;
    int places_ = 1;               // places of the boxes that messages leave through
    std::vector<Rank> ranks_;      // ranks of this process
    std::int64_t arena_bytes_ = 0; // bytes of the fullest rank's arena
    std::map<std::string, Shape> shapes_;
    std::map<std::string, std::vector<Holder>> holders_;
    std::vector<std::int32_t> tokens_; // [gbs, seq + 1] of the current step
    std::vector<std::int32_t> counts_; // likewise, 1 for a token that is a label where it stands, else 0
    std::vector<std::int32_t> starts_; // likewise, where each token's document begins; empty without masks
    std::vector<float> label_shares_;  // ProgramIo::label_shares of the current step
    std::array<float, 9> hyper_{};
    std::map<int, std::vector<float>> last_load_;   // RouterIo::last_load of the next step, by layer
    ScaleHistory scales_;                           // delayed scaling; process 0 has those of all stages
    std::vector<std::vector<std::int64_t>> routed_; // tokens of this process' ranks by layer, all steps
    std::int64_t done_ = 0, begun_ = 0;             // numbers of steps; begun_: steps done when this process began
    std::int64_t samples_ = 0;                      // samples taken by all steps
    std::int64_t batch_ = 0;                        // samples of the current step
    std::int64_t first_full_ = 0;                   // steps before the first one here of the plan's batch
    BadSteps bad_;
    std::int64_t first_timed_ = 0;
    struct KeptStep {
        double taken = 0.0, seconds = 0.0; // seconds of the step, with its stamps and without
    };
    std::vector<KeptStep> kept_; // steps by number modulo the vector's size
    run::Recorder::Clock::time_point zero_;
    int loss_rank_ = 0;
    std::atomic<Beside Rank::*> beside_{nullptr}; // what runs in place of the step, null: the step itself
    std::atomic<std::int64_t> smaller_batch_{0};  // the batch of a step that takes less than the plan's, else 0
    std::unique_ptr<run::Watchdog> watchdog_;     // The watchdog comes last, as it looks at the others.
};

// The times when train() saves, and the place: every `interval` steps (0: never in between), behind the last step, and
// when `stop` says so, which also ends the run.
struct Saving {
    CheckpointWriter& writer;
    std::int64_t interval = 0;
    std::function<bool()> stop;
    std::int64_t back_after = 0;                        // bad steps in a row behind which train() goes back, 0 = never
    std::function<void(const std::string& line)> say{}; // told of going back; may be empty
};

// Runs until options.steps steps are done; on_step is called after each on the caller's thread. With saving->back_after
// it goes back to the newest checkpoint behind so many bad steps in a row. Throws Error (failure) when the loss is no
// longer finite and bad steps are not skipped, behind 100 bad steps in a row, and where going back to one checkpoint
// three times has not helped.
std::vector<StepResult> train(Trainer& trainer, const TrainOptions& options, const SampleSource& source,
                              const std::function<void(const StepResult&)>& on_step, const Saving* saving = nullptr);

} // namespace moe::train
