// The closed form of a step: slot times that add up from segments, played over the pipeline slot by slot.
#pragma once

#include "planner/schedule.hpp"
#include "simulator/segment_cache.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace moe {

// One slot of a chunk, from its segments in order. `lead` seconds that the host is ahead at the start make it
// max(ahead, together - lead) long.
struct SlotTime {
    double ahead = 0.0, together = 0.0;
    double unaided = 0.0; // at its start, before its message is needed
    double host = 0.0;    // until everything is issued
    bool waits = false;   // the host waits on the way; at the end it is `lead_after` ahead, whatever it was before
    double lead_after = 0.0;
};

// A bucket of gradients: what its gather, reduction and update cost, and when the chunk uses it.
struct BucketTime {
    double gather = 0.0, zero = 0.0, reduce = 0.0, update = 0.0, squares = 0.0;
    double reload = 0.0, store = 0.0; // offloaded optimizer states, before and behind the update
    bool late_zero = false;           // its gradients are zeroed behind the gathers, which pass through the same memory
    // Seconds of the chunk's forward from the first use of the weights to the end; of its backward from the first and
    // from the last addition to the gradients to the end. The host being far ahead.
    double after_read = 0.0, after_written = 0.0, after_final = 0.0;
};

struct ChunkModel {
    SlotTime forward, backward;
    std::vector<std::pair<SegmentId, int>> segments; // with counts
    std::vector<BucketTime> buckets;                 // in the order of their gathers
    std::vector<std::size_t> reductions; // indices into buckets in the order in which gradients are finished
};

struct StepModel {
    std::vector<ChunkModel> chunks;      // distinct ones
    std::vector<std::vector<int>> ranks; // [pipeline rank][chunk]: index into chunks
    // EP overlap, [forward * chunks.size() + backward]: the pairs that the schedule merges, zero for others.
    std::vector<MergedTime> merged;
    double message = 0.0; // seconds of one activation between stages
    double norm = 0.0;    // all-reduce of the gradient norm
    // Pipeline ranks that add up their copies of the embedding's gradient, and seconds of one copy's way and addition.
    std::vector<int> table_holders;
    double table_message = 0.0, table_add = 0.0;
    double per_step = 0.0; // the stack's fixed time
};

// What playing a number of micro-batches gives, for one pipeline rank.
struct RankPlay {
    double end = 0.0;
    double issued = 0.0;                                         // when the host had issued the last slot
    double closing = 0.0;                                        // from the last slot to the end
    double host = 0.0, saved = 0.0, data = 0.0, optimizer = 0.0; // of the step, see Breakdown; saved: by overlap
};

// Orders of turns by (schedule, pp, vpp, micro-batches, rank, overlap), worked out once each. Thread-safe.
class Orders {
public:
    struct Order {
        std::vector<Turn> turns;
        std::vector<Kept> kept; // see kept_together()
    };
    const Order& of(const Plan& plan, int micro_batches, int rank);

private:
    std::mutex mutex_;
    std::map<std::array<int, 6>, std::unique_ptr<Order>> orders_;
};

std::vector<RankPlay> play_step(const Plan& plan, const StepModel& model, Orders& orders, int micro_batches);

} // namespace moe
