// The closed form of a step: slot times that add up from segments, played over the pipeline slot by slot.
#pragma once

#include "planner/lower/passes/step_ops.hpp"
#include "planner/plan/schedule.hpp"
#include "simulator/estimate/segment_cache.hpp"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace moe::estimate {

// A bucket of gradients: what its gather, reduction and update cost, and when the chunk uses it.
struct BucketTime {
    std::array<double, passes::step_work_count> seconds{}; // 0: there is none
    double& operator[](passes::StepWork work) { return seconds[static_cast<std::size_t>(work)]; }
    double operator[](passes::StepWork work) const { return seconds[static_cast<std::size_t>(work)]; }
    bool muon = false;    // see Bucket::Muon
    bool staged = false;  // its gradients are zeroed behind the gathers, which pass through the same memory
    bool in_line = false; // one rank has it: its matrices are quantized before the first forward, not beside it
    // The chunk's clocks at the end of its forward when the weights are there at 0 and everything else long before;
    // those at the end of its backward when the gradients are zeroed at 0.
    replay::StreamClocks after_weights = replay::no_clocks, after_zero = replay::no_clocks;
    replay::MaxPlusMatrix until_final; // the chunk's backward until its gradients are complete: the device's clock
};

struct ChunkModel {
    replay::MaxPlusMatrix forward, backward, first_backward; // paths of its segments in order
    double computes[2] = {1.0, 1.0};                         // part of the time of its forward and its backward
    std::vector<std::pair<SegmentId, int>> segments;         // segments with counts
    std::vector<BucketTime> buckets;                         // buckets in the order of their gathers
    replay::StreamClocks after_scales = replay::no_clocks;   // see SegmentCost; of the chunk's forward
    std::vector<std::size_t> reductions; // indices into buckets in the order in which gradients are finished
};

struct StepModel {
    std::vector<ChunkModel> chunks;      // distinct ones
    std::vector<std::vector<int>> ranks; // [pipeline rank][chunk]: index into chunks
    // EP overlap, [forward * chunks.size() + backward]: the pairs that the schedule merges, zero for others.
    std::vector<MergedTime> merged;
    double message = 0.0;        // seconds of one activation between stages
    double receive = 0.0;        // seconds of the kernel that takes it
    double message_launch = 0.0; // host seconds of an op that sends or receives one
    double step_launch = 0.0;    // host seconds of an op of the step: gathers, reductions, the optimizer
    double norm = 0.0;           // all-reduce of the gradient norm, and of what delayed scaling keeps
    double lost = 0.0;           // part of its rate that what computes loses to gathers and reductions beside it
    double per_step = 0.0;       // the stack's fixed time
    // Pipeline ranks that add up their copies of the embedding's gradient, and seconds of one copy's way and addition.
    std::vector<int> table_holders;
    double table_message = 0.0, table_add = 0.0;
};

// The result of playing a number of micro-batches, for one pipeline rank.
struct RankPlay {
    double end = 0.0;
    double issued = 0.0;                                         // when the host had issued the last slot
    double closing = 0.0;                                        // seconds from the last slot to the end
    double host = 0.0, saved = 0.0, data = 0.0, optimizer = 0.0; // seconds, see Breakdown; saved: by overlap
};

// Orders of turns by (schedule, pp, vpp, micro-batches, rank, overlap), worked out once each. Thread-safe.
class Orders {
public:
    struct Order {
        std::vector<plan::Turn> turns;
        std::vector<plan::Kept> kept; // see kept_together()
    };
    const Order& of(const plan::Plan& plan, int micro_batches, int rank);

private:
    std::mutex mutex_;
    std::map<std::array<int, 6>, std::unique_ptr<Order>> orders_;
};

std::vector<RankPlay> play_step(const plan::Plan& plan, const StepModel& model, Orders& orders, int micro_batches);

} // namespace moe::estimate
