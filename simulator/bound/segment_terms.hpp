// The terms that bounds know of a segment: its slot times and bytes, for every choice of recomputation from one
// lowering.
#pragma once

#include "planner/plan/choices.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/program.hpp"
#include "simulator/bound/flat_segment.hpp"
#include "simulator/estimate/segment_cache.hpp"
#include "simulator/estimate/state_memory.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace moe::bound {

using Busy = std::array<double, program::stream_count>; // seconds by stream

// One direction of a segment with the prices of one plan.
struct SideTerms {
    double device = 0.0;       // least seconds among others like it, the host being far ahead
    double together = 0.0;     // the same without recomputation, host and device starting at the same time
    double lead_after = 0.0;   // lead of the host at the end where it waits, at most
    double before_input = 0.0; // seconds at the start before the neighbour's message is needed
    double host = 0.0;         // seconds that the host works
    bool waits = false;        // whether the host waits for routed counts on the way
    Busy busy{};
    double merged = 0.0; // seconds that it computes in merged slots, where tokens on their way hold it up, at least
};
struct Terms {
    SideTerms sides[2];            // forward, backward
    std::int64_t saved = 0;        // bytes saved by one micro-batch
    estimate::Workspace workspace; // no packing goes below
    std::uint64_t groups = 0;
    double first_saves = 0.0; // seconds that a step's first backward is shorter, at most: its products set gradients
};

// What the searches of one machine and one stack know of segments: flat ones by the signature of the plain one and what
// is recomputed, and the terms of those that were played. Thread-safe; entries live as long as the library.
class SegmentLibrary {
public:
    struct Shape {
        std::map<unsigned, std::unique_ptr<FlatSegment>> flat; // segments by recomputed modules
        unsigned modules = 0;                                  // modules that recomputation of the segment can name
    };
    using PlainKey = estimate::SegmentKey<plan::Subject::size>; // of a plan without what plain segments share
    // The shape of a plain segment that was lowered before, or nullptr.
    Shape* known_shape(const PlainKey& key);
    Shape& shape_of(const plan::Plan& plan, const PlainKey& key, const program::Program& plain);
    // `plain`: lowered from this plan, without recomputation where the plan's own can be told from it. The result
    // recomputes these modules.
    const FlatSegment& flat(Shape& shape, const program::Program& plain, const plan::Plan& plan, unsigned recompute,
                            estimate::SegmentId id);

    struct TermsKey {
        estimate::SegmentKey<plan::Subject::time> time;
        estimate::Placements places;
        bool coarse; // terms of SegmentTerms::coarse()
        bool operator==(const TermsKey&) const = default;
        std::size_t hash() const { return (time.hash() ^ estimate::hash_of(places)) + (coarse ? 1 : 0); }
    };
    struct KeyHash {
        std::size_t operator()(const PlainKey& key) const { return key.hash(); }
        std::size_t operator()(const TermsKey& key) const { return key.hash(); }
    };
    const Terms* known_terms(const TermsKey& key); // nullptr where nobody has worked them out
    const Terms& keep(const TermsKey& key, const Terms& terms);

private:
    struct TextHash {
        std::size_t operator()(const std::vector<std::int32_t>& text) const {
            std::uint64_t sum = text.size();
            for (const std::int32_t word : text)
                sum = (sum ^ static_cast<std::uint32_t>(word)) * 0x9E3779B97F4A7C15U + (sum >> 29);
            return static_cast<std::size_t>(sum ^ sum >> 32);
        }
    };
    std::mutex mutex_;
    std::unordered_map<std::vector<std::int32_t>, std::unique_ptr<Shape>, TextHash> shapes_;
    std::unordered_map<PlainKey, Shape*, KeyHash> known_shapes_;
    std::unordered_map<TermsKey, Terms, KeyHash> terms_;
    std::vector<std::shared_ptr<const model::Model>> models_; // kept alive: keys name them by address
};

// The plan as far as the times of ops outside of merged slots depend on it: EP overlap changes them only where a stack
// says that it takes multiprocessors from all that computes.
plan::Plan priced_as(plan::Plan plan, const stack::Stack& stack);
// The plan by which prices of its segments are kept: priced_as(), and without a pipeline where only our own engine's
// messages and tokens would be dearer for it.
plan::Plan named_as(const plan::Plan& plan, const stack::Stack& stack);

// Terms of the segments of one model's plans. For one thread; entries live until forget().
class SegmentTerms {
public:
    SegmentTerms(const estimate::SegmentCache& cache, SegmentLibrary& library) : cache_(cache), library_(library) {}
    // place: a number of the plan's placements, which are `places`. `costs` of the plan.
    const Terms& of(const plan::Plan& plan, estimate::SegmentId id, int place, const estimate::Placements& places,
                    const cost::CostModel& costs);
    // FSDP: terms that are no greater, from layers with whole weights, whose lowering all recomputation shares. Every
    // op takes the shorter of its times with and without FSDP, whose gradients are written where others are added up.
    const Terms& coarse(const plan::Plan& plan, estimate::SegmentId id, int place, const estimate::Placements& places,
                        const cost::CostModel& costs);
    // The segment without recomputation, its prices and which op waits for which.
    struct Priced {
        const program::Program& program;
        const FlatSegment& flat;
        const std::vector<cost::OpCost>& prices;
        const std::vector<double>& first_saves; // seconds as Terms::first_saves, by op of the backward
        std::array<double, 2> held_up;          // seconds by which the directions compute longer in merged slots
        const std::vector<std::int64_t>& bytes; // bytes of activations, by tensor
    };
    Priced priced(plan::Plan plan, estimate::SegmentId id, int place, const cost::CostModel& costs);
    void forget();

private:
    struct Key {
        estimate::SegmentKey<plan::Subject::time> time;
        int place;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const {
            return key.time.hash() * 31 + static_cast<std::size_t>(key.place);
        }
    };
    template <class Value>
    using ByKey = std::unordered_map<Key, Value, KeyHash>;
    struct Plain {       // a segment without recomputation, with the sizes of one plan
        plan::Plan plan; // one of several plans that share it, with as many tensors as the program has
        SegmentLibrary::Shape* shape = nullptr;
        program::Program program;
        std::vector<std::int64_t> bytes;
    };
    const Plain& plain(const plan::Plan& plan, estimate::SegmentId id);
    // Modules that recomputation of the segment can name.
    unsigned modules(const plan::Plan& plan, estimate::SegmentId id);
    struct Prices {
        std::vector<cost::OpCost> ops; // costs of both directions
        std::vector<double> first_saves;
        std::array<double, 2> held_up{}; // seconds as Priced::held_up
    };
    static Prices device_prices(const Plain& plain, const plan::Plan& plan, const cost::CostModel& costs);
    const Prices& prices(const Plain& plain, const plan::Plan& plan, estimate::SegmentId id, int place,
                         const cost::CostModel& costs);

    static bool begins_early(const plan::Plan& plan, estimate::SegmentId id);
    // early: what may run under the layer before takes no time, if that is shorter.
    Terms played(const Plain& base, const plan::Plan& plan, estimate::SegmentId id,
                 const std::vector<cost::OpCost>& ops, const std::array<double, 2>& held_up, bool early);

    const estimate::SegmentCache& cache_;
    SegmentLibrary& library_;
    std::unordered_map<SegmentLibrary::PlainKey, Plain, SegmentLibrary::KeyHash> plains_;
    ByKey<Prices> prices_, devices_;            // prices of a plan, and the part of them that CUDA graphs do not change
    ByKey<const Terms*> terms_, coarse_;        // in the library
    ByKey<std::vector<cost::OpCost>> cheapest_; // prices of coarse(), without recomputation
    std::vector<double> ends_;                  // scratch
};

// Ops that may run under the layer before: rings of saved keys and values, rows that come back from the stash or from
// the host, and weights that FSDP gathers.
bool runs_early(const program::Op& op);

} // namespace moe::bound
