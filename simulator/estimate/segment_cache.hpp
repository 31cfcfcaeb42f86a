// Segments of plans (one layer of a kind, the ends of the model), lowered, measured in memory and played once each.
#pragma once

#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/plan/plan_key.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/estimate/merged_slots.hpp"
#include "simulator/estimate/segment_cost.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe::estimate {

// True where the segment routes tokens to experts in some plans of the model.
bool has_experts(const plan::Plan& plan, SegmentId id);
unsigned parts_of(const plan::Plan& plan, SegmentId id); // plan::part

// Each group of either domain has a bit of its own, since axes are five bits. Groups along the parts of TP where key
// heads have replicas are three, which have those of no other group.
inline constexpr std::array<std::pair<int, std::uint16_t>, 3> key_groups{
    {{plan::axis::expert | plan::axis::tensor, plan::axis::key_parts},
     {plan::axis::expert | plan::axis::context | plan::axis::tensor,
      plan::axis::key_replicas | plan::axis::context | plan::axis::data},
     {plan::axis::expert | plan::axis::pipeline | plan::axis::tensor,
      plan::axis::key_replicas | plan::axis::context | plan::axis::shards}}};
inline std::uint64_t group_bit(plan::Group group) {
    if (group.axes == 0) return 0;
    for (const auto& [bit, axes] : key_groups)
        if (group.axes == axes) return std::uint64_t{1} << bit;
    // The parts of the context, of the expert and of the data axis stand where no group is: beside the axis that the
    // domain has not.
    const int absent = group.domain == plan::Domain::dense ? plan::axis::expert : plan::axis::context;
    const int axes =
        group.axes == plan::axis::context_inner    ? plan::axis::expert
        : group.axes == plan::axis::context_outer  ? plan::axis::expert | plan::axis::context
        : group.axes == plan::axis::expert_inner   ? plan::axis::expert | plan::axis::context
        : group.axes == plan::axis::expert_outer   ? plan::axis::expert | plan::axis::context | plan::axis::tensor
        : (group.axes & plan::axis::shards) != 0   ? (group.axes & ~plan::axis::shards) | plan::axis::data | absent
        : (group.axes & plan::axis::replicas) != 0 ? plan::axis::pipeline | absent
                                                   : group.axes;
    return std::uint64_t{1} << (32 * static_cast<int>(group.domain) + axes);
}
// The group of one bit.
inline plan::Group group_of_bit(int bit) {
    for (const auto& [place, axes] : key_groups)
        if (bit == place) return {plan::Domain::dense, axes};
    const int axes = bit % 32;
    if (bit == plan::axis::expert) return {plan::Domain::dense, plan::axis::context_inner};
    if (bit == (plan::axis::expert | plan::axis::context)) return {plan::Domain::dense, plan::axis::context_outer};
    if (bit == 32 + (plan::axis::expert | plan::axis::context)) return {plan::Domain::expert, plan::axis::expert_inner};
    if (bit == 32 + (plan::axis::expert | plan::axis::context | plan::axis::tensor))
        return {plan::Domain::expert, plan::axis::expert_outer};
    const plan::Domain domain = bit < 32 ? plan::Domain::dense : plan::Domain::expert;
    const int absent = bit < 32 ? plan::axis::expert : plan::axis::context;
    if ((axes & absent) != 0 && (axes & plan::axis::data) != 0)
        return {domain, static_cast<std::uint16_t>((axes & ~(absent | plan::axis::data)) | plan::axis::shards)};
    if ((axes & absent) != 0 && (axes & plan::axis::pipeline) != 0) return {domain, plan::axis::replicas};
    return {domain, static_cast<std::uint16_t>(axes)};
}

// The sizes that the closed form needs of a lowered segment; the Program itself would fill gigabytes over a search.
struct SegmentSize {
    memory::SegmentMemory memory;
    std::uint64_t groups = 0; // groups of its communication, see group_bit()
    std::int64_t slots = 0;   // bytes that its exchanges pack rows into
    int scaled = 0;           // operands with scales of their history
};

// The fields that a segment of some plans depends on, as far as one subject goes.
template <plan::Subject subject>
struct SegmentKey {
    SegmentKey(const plan::Plan& p, SegmentId segment) : plan(p, parts_of(p, segment)), id(segment) {}
    plan::PlanKey<subject> plan;
    SegmentId id;
    auto operator<=>(const SegmentKey&) const = default;
    std::size_t hash() const {
        return plan.hash() * 31 + static_cast<std::size_t>(id.kind) * 1024 + static_cast<std::size_t>(id.layer_kind);
    }
};

// The placements of the groups of a segment's communication: tensor, context, expert, expert tensor, dispatch; then,
// where the plan has them gather or reduce within a segment, those of data parallelism, dense and of experts, the ranks
// that share a micro-batch, the parts of CP, the ranks that shard replicated key heads, and the parts of EP.
using Placements = std::array<cost::Placement, 13>;
inline std::size_t hash_of(const Placements& places) {
    std::size_t sum = 0;
    for (const cost::Placement& p : places)
        for (const int number : {p.size, p.per_domain, p.nodes}) sum = sum * 31 + static_cast<std::size_t>(number);
    return sum * 0x9E3779B97F4A7C15U;
}

// Thread-safe; entries live as long as the cache. One machine, one stack, any models and plans.
class SegmentCache {
public:
    SegmentCache(const machine::Hardware& hardware, stack::Stack stack);

    Placements placements(const plan::Plan& plan) const;

    const SegmentSize& size(const plan::Plan& plan, SegmentId id);
    const SegmentCost& cost(const plan::Plan& plan, SegmentId id);
    // EP overlap: a chunk's forward beside a chunk's backward. `player` must be of the plan.
    MergedTime merged(const plan::Plan& plan, MergedPlayer& player, const Segments& forward, const Segments& backward);
    // Buckets of the segment alone; elements only, groups as in this plan.
    const std::vector<passes::BucketSize>& buckets(const plan::Plan& plan, SegmentId id);
    // Buckets of a whole stage, cut as the lowering cuts them.
    const std::vector<passes::BucketSize>& stage_buckets(const plan::Plan& plan, const plan::Stage& stage);
    const cost::Machine& machine() const { return machine_; }
    const stack::Stack& stack() const { return stack_; }

private:
    const SegmentSize& lowered(const plan::Plan& plan, SegmentId id, std::int64_t mbs);
    // Seconds and the buckets that the ops use, whose elements are padded to the group that shares them.
    struct CostKey {
        SegmentKey<plan::Subject::time> time;
        plan::PlanKey<plan::Subject::weights> weights;
        bool shares_table;
        Placements places;
        auto operator<=>(const CostKey&) const = default;
        std::size_t hash() const { return time.hash() ^ hash_of(places); }
    };
    struct BucketKey {
        plan::PlanKey<plan::Subject::weights> weights;
        bool shares_table;
        SegmentId id; // or a stage
        std::array<int, 5> stage;
        bool operator==(const BucketKey&) const = default;
        std::size_t hash() const {
            std::size_t sum =
                weights.hash() + static_cast<std::size_t>(id.kind) * 1024 + static_cast<std::size_t>(id.layer_kind);
            for (const int part : stage) sum = sum * 31 + static_cast<std::size_t>(part);
            return sum;
        }
    };
    struct KeyHash {
        template <class Key>
        std::size_t operator()(const Key& key) const {
            return key.hash();
        }
    };
    CostKey cost_key(const plan::Plan& plan, SegmentId id) const;
    void keep_model(const plan::Plan& plan); // under the lock

    cost::Machine machine_;
    stack::Stack stack_;
    std::mutex mutex_;
    std::unordered_map<SegmentKey<plan::Subject::size>, std::unique_ptr<SegmentSize>, KeyHash> sizes_;
    std::unordered_map<CostKey, std::unique_ptr<SegmentCost>, KeyHash> costs_;
    std::map<std::tuple<CostKey, Segments, Segments>, MergedTime> merged_;
    std::unordered_map<BucketKey, std::unique_ptr<std::vector<passes::BucketSize>>, KeyHash> buckets_;
    std::vector<std::shared_ptr<const model::Model>> models_; // kept alive: keys name them by address
};

} // namespace moe::estimate
