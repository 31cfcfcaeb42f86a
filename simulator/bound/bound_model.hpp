// The bound model of FastEstimator: layers and stages worked out once each, composed in a fraction of a microsecond.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"
#include "simulator/bound/bound.hpp"
#include "simulator/estimate/stage_memory.hpp"

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moe::bound {

class FastBoundModel : public search::BoundModel {
public:
    explicit FastBoundModel(BoundSources sources) : sources_(sources), terms_(sources.segments, sources.library) {}

    int layer_costs(const plan::Plan& plan) override;
    int stage_split(const plan::Plan& plan) override;
    search::LowerBound bound(int layers, int stages) override;
    double merged_step_bound(const plan::Plan& plan) override;
    double step_bound(int layers) override;
    double early_step_bound(const plan::Plan& plan) override;
    int early_layer_costs(const plan::Plan& plan) override;
    int near_layer_costs(const plan::Plan& plan) override;
    int coarse_layer_costs(const plan::Plan& plan) override;
    std::vector<double> dominance_key(int layers) override;
    double least_bytes(const plan::Plan& plan) override;
    double kept_bytes(const plan::Plan& plan) override;
    int placement(const plan::Plan& plan) override;
    void forget() override;

private:
    // Played op by op, slots of a pipeline that is never full, and those that share the link to the host, overlap a
    // little: by what the tiers may differ.
    static constexpr double tiers_apart = 0.97;
    static bool offloads(const plan::Plan& plan) { return (plan.offload & plan::offload::activations) != 0; }

    struct Layers {
        std::vector<const Terms*> terms; // terms by segment; none for those that few cuts have, see complete()
        std::vector<double> pool_bytes;  // bytes of the saved activations of the segments of each pool
        int pools = 0;                   // number of the way in which segments share pools
        // The early terms of the segments of coarse_layer_costs(), which give way to coarse ones; null for others.
        std::vector<Terms>* early = nullptr;
        plan::Plan plan;
        double message_bytes = 0.0;
    };

    // The most that a pipeline rank keeps: segments by pool, those of equal size sharing one, see most_kept().
    struct RankKept {
        std::vector<int> most;
        bool merges = false;
    };
    using KeptSegments = std::vector<RankKept>;

    struct Chunk {                                        // sums over the segments of a stage
        double forward = 0.0, backward = 0.0;             // seconds with the host far ahead
        double early_forward = 0.0, early_backward = 0.0; // seconds at the start before the message is needed
        double host = 0.0;                                // host seconds of both, without waiting
        double first_saves = 0.0;                         // seconds by which a step's first backward is shorter
        // Seconds before a step's first forward and behind its last backward: by stream where backwards run in two
        // slots, else of whole slots, under Stream::compute.
        Busy opening{}, behind{};
        Busy busy_forward{}, busy_backward{};
    };

    // The least that some segments of a chunk have moved as a step begins and ends: those up to a segment of a part of
    // Stages::parts, itself included, that others before them have not.
    struct Moved {
        int part = 0, segments = 0;
        double gather = 0.0, reduce = 0.0; // seconds
        double quantize = 0.0;             // part of the gather's that no collective takes
    };

    struct Stages {
        plan::Plan plan;
        std::optional<plan::Mesh> mesh; // of the plan
        const estimate::Shape* shape = nullptr;
        std::vector<std::vector<std::pair<int, int>>> parts; // segment of the model and count, by distinct stage
        bool rare = false;                                   // some of them are segments that few cuts have
        std::vector<estimate::StageMemory> memory;           // states and groups; the rest is the layers'
        std::vector<std::vector<Moved>> moved;               // moves of a step's begin, by distinct stage
        double zero = 0.0;                                   // seconds that the first rank zeroes gradients
        double lost = 0.0;    // part of its rate that what computes loses to gathers and reductions beside it
        double closing = 0.0; // seconds of norm and optimizer behind the last slot, and of the stack
        double message_start = 0.0, message_per_byte = 0.0;
        std::map<std::array<int, 3>, const KeptSegments*> kept; // segments by micro-batches, EP overlap, pools
    };

    void list_segments(const std::shared_ptr<const model::Model>& model);
    int find_placement(const plan::Plan& plan);
    // Step seconds where every rank has an even share of all layers, which have these terms.
    double spread(const plan::Plan& plan, const std::vector<const Terms*>& terms);
    // States of all layers and both ends, as one rank without a pipeline has them.
    estimate::StageMemory whole_model(const plan::Plan& plan);
    // Seconds behind the last slot that offloaded optimizer states travel, spread evenly over the ranks.
    double least_visit(const plan::Plan& plan);
    // Seconds in which one micro-batch passes all layers at least, all of them on one rank: of what computes, which a
    // step's first backwards may do faster, and of what does not.
    struct Passing {
        double computing = 0.0, other = 0.0;
    };
    // terms: of each segment of the model.
    Passing least_of_all(const plan::Plan& plan, const std::vector<const Terms*>& terms) const;
    double resharding_seconds(const std::vector<const Terms*>& terms) const;
    std::vector<Terms> early_terms(const plan::Plan& plan);
    int add_layers(const plan::Plan& plan, std::vector<Terms>* early);
    void find_terms(Layers& layers, std::size_t segment);
    int add_floors(const plan::Plan& plan, const std::vector<Terms>& terms);
    // Whether coarse terms of the plan are cheaper than its own.
    static bool coarse(const plan::Plan& plan) {
        const bool parts = (plan.recompute & plan::recompute::operators) != 0; // of products, which few share
        return plan.reshards() && !plan.paged_stash && !offloads(plan) && !parts;
    }
    // Works out what the model has in one place and these stages in another: most layers are never asked for it.
    void complete(Layers& layers, const Stages& stages);
    // The stages of a handle, filled with these layers.
    Stages& filled_with(Layers& layers, int stages_handle);
    void find_pools(Layers& layers);
    int pools_of(std::vector<int> pools);
    int segment(estimate::SegmentId id) const {
        return static_cast<int>(std::find(segments_.begin(), segments_.end(), id) - segments_.begin());
    }
    std::vector<passes::BucketSize> buckets(const plan::Plan& plan, const plan::Stage& stage,
                                            const estimate::Segments& segments);
    Stages stages_of(const plan::Plan& plan);
    std::vector<Moved> moved_of(const plan::Plan& plan, const cost::CostModel& costs,
                                const estimate::StageShape& shape);
    void sum_chunks(const Layers& layers, const Stages& stages);
    static void add_ends(const Layers& layers, const Stages& stages, std::size_t stage, Chunk& chunk);
    const Chunk& chunk(const Stages& stages, int rank, int c) const {
        const plan::Plan& plan = stages.plan;
        return chunks_[static_cast<std::size_t>(
            stages.shape->of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, rank, c))])];
    }
    search::LowerBound split_bound(const Layers& layers, Stages& stages, int micro_batches);
    double filled(const Layers& layers, Stages& stages);
    // Step seconds of ranks whose slots take so long, one after another.
    double composed(const Layers& layers, const Stages& stages, const std::vector<double>& slots);
    // Seconds that the first backwards of a rank's chunks are shorter than others, at most.
    double first_saves(const Stages& stages, int rank) const;
    double issue(const Stages& stages, int rank, int micro_batches) const;
    double slots(const Layers& layers, const Stages& stages, int rank, int micro_batches) const;
    const KeptSegments& kept(const Layers& layers, Stages& stages);

    BoundSources sources_;
    std::shared_ptr<const model::Model> model_;
    std::vector<estimate::SegmentId> segments_; // segments of the model
    std::vector<int> counts_;                   // count of each in the model
    SegmentTerms terms_;
    std::vector<Layers> layers_;
    // Branches of a family that differ in the micro-batch ask for the same.
    static constexpr std::size_t most_stages = 8192; // known between branches, some KB each
    std::unordered_map<plan::PlanKey<plan::Subject::cut>, std::unique_ptr<Stages>, plan::PlanKeyHash> known_stages_;
    std::vector<Stages*> stages_;
    std::unordered_map<plan::PlanKey<plan::Subject::cut>, double, plan::PlanKeyHash> known_visits_; // of least_visit()
    std::vector<estimate::Placements> placements_;
    // Parts of all segments, dense and routed: early_terms() is asked often.
    using Parts = std::vector<const LayerPart*>;
    std::unordered_map<PartFloors::Key<plan::Subject::dense>, Parts, PartFloors::Hash> dense_parts_;
    std::unordered_map<PartFloors::Key<plan::Subject::routed>, Parts, PartFloors::Hash> routed_parts_;
    std::deque<std::vector<Terms>> own_terms_;    // terms behind handles
    std::vector<std::array<int, 2>> part_places_; // numbers of the groups of a placement: dense, expert
    std::unordered_map<plan::PlanKey<plan::Subject::place>, int, plan::PlanKeyHash> known_places_;
    std::optional<plan::PlanKey<plan::Subject::place>> last_mesh_; // key of the last placement()
    int last_place_ = -1;
    std::vector<Chunk> chunks_; // scratch
    std::vector<estimate::StageMemory> memory_;
    std::vector<estimate::KeptActivations> saved_;
    std::vector<double> slots_, ends_;
    std::vector<std::vector<int>> pools_; // pool of each segment
    std::map<std::tuple<const estimate::Shape*, plan::ScheduleKind, int, bool, int>, KeptSegments>
        kept_; // kept segments as Stages::kept, for any stages
};

} // namespace moe::bound
