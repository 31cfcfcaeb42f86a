// Interprets a Program for one rank, op by op in the order that OpWalk goes.
#pragma once

#include "engine/device/arena.hpp"
#include "engine/device/streams.hpp"
#include "engine/ops/backend.hpp"
#include "engine/ops/op_context.hpp"
#include "engine/run/graph_runs.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/stamps.hpp"
#include "engine/run/watchdog.hpp"
#include "planner/program/block_products.hpp"
#include "planner/program/program.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace moe::run {

// Executes the Program of one rank. On the CPU a rank is one thread, and the listed order satisfies every dependency.
// On a device with a queue every op goes to the stream that the Program names, behind those that StreamOrder says.
// Without `replayed`, the queue is given a step op by op whatever it can do: it holds the record of one Program.
class Executor {
public:
    Executor(const program::Program& program, const device::Arena& arena, const plan::Mesh& mesh, int rank,
             const ops::Backend& backend, comm::Communicator& communicator, bool replayed = true);

    // The parts of this rank's shards that the optimizer treats differently, by bucket; before prepare().
    void set_parts(std::vector<std::vector<ops::ShardPart>> parts) { parts_ = std::move(parts); }
    // Has the queue record the parts of a step that the plan's graphs hold (program::in_graph), the rest going op by
    // op; before prepare(), on a device with a queue whose back end can_replay.
    void capture_scopes(const plan::Plan& plan) { runs_ = graph_runs(program_, plan, *order_, arena_); }
    // Facts of those parts and the host's time for the whole step, the median of the last ones; none without parts.
    device::QueuedStep queued_parts() const;
    // Records the step on a device with a queue, or loads what it needs. To be called once, before any rank's first
    // step: ranks that are not alone must come to their communication with everything loaded.
    void prepare();

    // Runs every slot once; returns when the work is done. Errors name rank, op, layer and slot. On a device with a
    // queue, ops are stamped only where `timed`, because stamps between ops cost time there; record() reads the stamps,
    // which takes a microsecond each and is no part of the step.
    void step(Recorder& recorder, bool timed);
    void record(Recorder& recorder);

    // Tokens of this rank that chose each expert in the last step: [global layer][expert], empty for layers that this
    // rank does not run or that have no experts. Only where ops run as they are called: a queue's results lie on its
    // device, which no op of a step waits for.
    const std::vector<std::vector<std::int64_t>>& routed_tokens() const { return routed_tokens_; }

    // From now on steps keep the largest logit of each attention head that this rank runs; only where
    // Backend::tells_logits. largest_logits(): those of the last step, [global layer][query head of the model], scale
    // included, -infinity for heads of other ranks; layers without any may be empty or missing.
    // To be called before prepare(): a device with a queue gives memory for them, where steps keep them.
    void watch_logits();
    const std::vector<std::vector<float>>& largest_logits() const { return largest_logits_; }

    // Declares that this rank has work until step() has ended: a thread that never takes it up hangs as well.
    void begin() { busy_ = true; }

    // The cost of a stamp and of all stamps on a device with a queue, by the last recorded step. Neither is in the
    // record.
    double event_overhead() const { return stamp_; }
    double usual_stamp_seconds() const { return usual_stamp_; }
    double removed_seconds() const { return removed_; }

    // The rank's standing, for any thread. On a device with a queue only communication says how far the step is; a rank
    // that is alone there counts as waiting.
    Standing standing() const;

private:
    std::string place(const program::Op& op, std::size_t slot) const;
    void enqueue(device::Queue& queue, bool timed);
    void enqueue_run(device::Queue& queue, const GraphRun& run, bool timed);
    void play_run(device::Queue& queue, const GraphRun& run, bool timed);
    void record_runs(device::Queue& queue);
    void await_end(device::Queue& queue);
    double plain_seconds() const;
    EventClock clock_of_stamps(device::Queue& queue);
    int stuck() const;
    std::string others(const program::Op& op) const;
    void play(device::Queue& queue, Recorder& recorder, bool timed);
    void call(const program::OpWalk& at, int stream = 0, bool boxes = false);
    void run(const program::OpWalk& at, void* stream, bool boxes);
    [[noreturn]] void report(const program::Op& op, std::size_t slot, const std::exception& error) const;
    std::size_t bucket_of(const program::Op& op) const;
    void count_tokens(const program::Op& op);
    float* logits_of(const program::Op& op);
    void clear_logits();
    void fetch_logits();

    const program::Program& program_;
    std::optional<program::BlockProducts> blocks_; // where Backend::block_scaled_gemm takes them
    const device::Arena& arena_;
    const ops::Backend& backend_;
    comm::Communicator& communicator_;
    const plan::Mesh& mesh_;
    ops::RankPosition position_;
    std::vector<std::int64_t> bucket_offset_;        // elements of each bucket before this rank's shard
    std::vector<std::vector<ops::ShardPart>> parts_; // by bucket, empty without any
    std::vector<void*> in_, out_;                    // operands of the current op
    std::vector<std::vector<std::int64_t>> routed_tokens_;
    bool watches_logits_ = false;
    std::vector<std::vector<float>> largest_logits_;
    // Where there is a queue: those of all layers, one behind the other, on the device and on their way from it.
    device::Memory device_logits_;
    std::vector<float> flat_logits_;
    device::Queue* queue_ = nullptr;
    std::optional<device::StreamOrder> order_;         // order of the ops on streams, where there is a queue
    std::vector<const program::Op*> ops_;              // ops by number in the order of OpWalk, where there is a queue
    std::vector<std::size_t> slots_;                   // slots of those ops
    bool marked_ = false;                              // whether communication marks its way, as the rank is not alone
    int reserved_sms_ = 0;                             // multiprocessors that another kernel holds meanwhile
    std::atomic<std::uint64_t> calls_{0};              // calls begun and calls ended, counted together
    std::atomic<const program::Op*> current_{nullptr}; // op that was begun last
    std::atomic<std::size_t> current_slot_{0};
    std::atomic<bool> busy_{false};
    bool replayed_ = true;            // whether a queue that can replay its record does so
    std::vector<GraphRun> runs_;      // parts of a step that are records
    bool runs_recorded_ = false;      // whether they have been recorded
    device::QueuedStep queued_parts_; // facts of those of a step without stamps, except the host's time
    std::array<double, 64> host_seconds_{};
    std::size_t host_steps_ = 0;
    // Times that the last steps without stamps took on the device.
    static constexpr std::size_t kept_plain = 64;
    std::array<double, kept_plain> plain_{};
    std::size_t plain_steps_ = 0;
    double zero_ = 0.0; // recorder's time at which the last step was given to the queue
    double usual_stamp_ = 0.0, stamp_ = 0.0, removed_ = 0.0;
};

} // namespace moe::run
