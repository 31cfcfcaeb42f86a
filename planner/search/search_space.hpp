// The space that a search request spans: which degrees, cuts and choices there are, and which of them are impossible.
#pragma once

#include "planner/plan/schedule.hpp"
#include "planner/search/search.hpp"
#include "planner/stack/rules.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace moe::search {

// Rejected candidates by reason, with the first message of each.
struct Rejections {
    struct Reason {
        std::int64_t count = 0;
        std::string message;
    };
    std::map<std::string, Reason> reasons;

    void add(const plan::PlanFault& fault, std::int64_t count);
    void merge(const Rejections& other);
    std::int64_t total() const;
};

// One way to cut the layers into pp*vpp stages, with what a bound needs to know of it; shares are of the mean.
struct StageSplit {
    std::string layout;        // "" = the even cut
    double heaviest_rank = 1;  // model FLOPs of the heaviest pipeline rank, MTP and head included
    double most_layers = 1;    // decoder layers alone of the pipeline rank that has most, against the same mean
    double most_held = 1;      // decoder and MTP layers of the rank that has most, against the mean of those
    double lightest_chunk = 1; // model FLOPs of the lightest stage, against the mean stage
    // Inputs of decoder layers that a pipeline rank keeps on average when as many micro-batches are under way as there
    // are ranks: rank r of pp has at least pp - r of them in all its chunks, with any schedule.
    double mean_kept = 0;
    bool possible = false; // false: nothing cuts the model into so many stages, which check_plan() refuses
};

// Degrees that fix the ranks' layout once the family is known.
struct ParallelConfig {
    int pp = 1, dp = 1, edp = 1;
};

// A field that search chooses for layers: its values by the words of set_field(), the usual one first, and where there
// is a choice at all; elsewhere the first value stands.
struct Option {
    const char* field;
    std::vector<std::string> values;
    bool (*applies)(const plan::Plan& plan); // depends on the degrees alone: whether tp, cp, ep, etp and pp exceed 1
};

// Sets of recomputed modules beside one root, by index into recompute_sets().
struct RootSets {
    std::vector<std::size_t> sound;
    Rejections rejected; // each other set once
};

// Plans whose layers consist of the same ops for a given micro-batch: they differ in pipeline and data parallelism.
struct LayerOptions {
    machine::Precision precision = machine::Precision::bf16;
    int tp = 1, cp = 1, ep = 1, etp = 1;
    std::vector<ParallelConfig> parallel_configs;
};

class SearchSpace {
public:
    // Throws Error (bad_input) for fields that cannot be pinned as asked. If `known` is given, of options that spare no
    // memory only what it has, where there is a choice.
    SearchSpace(const SearchRequest& request, const stack::Stack& stack, const plan::Plan* known = nullptr);

    // Sorted so that families which tend to be fast come first. Mappings that are impossible with every micro-batch and
    // chunk count are not in them but in rejected().
    const std::vector<LayerOptions>& layer_options() const { return families_; }
    const Rejections& rejected() const { return rejected_; }

    // vpp: the fewest chunks for each size of the largest one, since more chunks of that size are only less even.
    std::vector<int> chunk_counts(int pp) const;
    // Divisors of a rank's batch, ascending: all to every_mbs_to, above it powers of two and three times those; {1}
    // where dp does not divide the batch.
    std::vector<std::int64_t> micro_batch_sizes(int dp) const;
    static constexpr std::int64_t every_mbs_to = 16;
    const std::vector<StageSplit>& stage_splits(int pp, int vpp) const;   // holds at least one
    const std::vector<unsigned>& recompute_sets() const { return sets_; } // fewer modules first; sound for the model
    // Every set of the stack's modules that differs in what it repeats of the model.
    static std::vector<unsigned> every_set(const std::shared_ptr<const model::Model>& model, const stack::Stack& stack);
    const std::vector<plan::OptimizerChoice>& optimizers() const {
        return optimizers_;
    } // the one with fewer bytes first
    // Every combination of the options that plans with these degrees have: plans of those fields alone.
    const std::vector<plan::Plan>& roots(int tp, int cp, int ep, int etp, int pp) const;
    // The first root, for each root, that differs from it in CUDA graphs at most.
    const std::vector<std::size_t>& without_graphs(int tp, int cp, int ep, int etp, int pp) const;
    // The recompute sets and optimizers that go with each root in the options' precision, with one chunk per rank or
    // several.
    const std::vector<RootSets>& sets_of_roots(const LayerOptions& options, int pp, bool chunks) const;
    // Roots times recompute sets times optimizers.
    std::int64_t choices(int tp, int cp, int ep, int etp, int pp) const;

    // A candidate with the stack's usual dispatcher, CUDA graphs and EP overlap, unless pinned.
    plan::Plan candidate(const LayerOptions& family, const ParallelConfig& mapping, int vpp, std::int64_t mbs) const;
    // check_plan() and check_stack().
    plan::PlanFault fault_of(const plan::Plan& plan) const;
    // The same of a plan of the space, which has the options of that root of its degrees.
    plan::PlanFault fault_of(const plan::Plan& plan, std::size_t root) const;
    // What keeps degrees, batch and stages from going together, whatever is chosen beside them.
    plan::PlanFault fault_of_degrees(const plan::Plan& plan) const;
    // Asks for any choices that go with the plan's degrees, batch and stages: its own, else the first of the options
    // and optimizers that are sound, which the plan then has, without recomputation where that is in the way. Where
    // none is, what excludes the plan's own.
    plan::PlanFault settle(plan::Plan& plan) const;
    // The n-th optimizer to try with a root: the first one is sound beside its options where any is.
    const plan::OptimizerChoice& optimizer(const plan::Plan& root, std::size_t n) const;

    bool pinned(const std::string& field) const { return pinned_.count(field) != 0; }
    const std::set<std::string>& pinned() const { return pinned_; }
    const plan::Plan& base() const { return base_; }

private:
    struct Dense {
        int tp, cp, dp;
    };
    struct Expert {
        int etp, ep, edp;
    };
    void pin(const SearchRequest& request, const stack::Stack& stack);
    void make_cuts();
    std::vector<StageSplit> cuts_of(int pp, int vpp, const std::vector<plan::Stage>& balanced) const;
    void make_families(machine::Precision precision);
    std::vector<Dense> dense_factors(int ranks) const;
    std::vector<Expert> expert_factors(int ranks) const;
    std::vector<Option> options() const;
    void combine_options(const plan::Plan* known);
    std::vector<machine::Precision> precisions(const SearchRequest& request) const;
    void combine_sets(machine::Precision precision);
    static std::size_t degrees_above_one(int tp, int cp, int ep, int etp, int pp); // index of their roots
    void plan_rows(plan::Plan& plan) const;
    RootSets sets_of(plan::Plan root, const stack::OpenRules& rules) const;
    stack::OpenRules open_rules(const plan::Plan& root) const;
    const plan::OptimizerChoice& first_optimizer(plan::Plan root) const;
    std::vector<plan::PlanFault> faults(plan::Plan plan) const;
    plan::PlanFault fault_of_choices(const plan::Plan& plan) const;
    plan::PlanFault settle_choices(plan::Plan& plan) const;
    bool offered(const plan::Plan& plan) const;
    plan::PlanFault fault_of_mapping(const LayerOptions& family, const ParallelConfig& mapping);
    // cuts: ways to cut the layers into pp stages.
    std::vector<Dense> sound_dense(machine::Precision precision, int pp, std::int64_t cuts,
                                   const std::vector<Expert>& experts);

    plan::Plan base_;
    const stack::Stack& stack_;
    std::set<std::string> pinned_;
    std::vector<unsigned> sets_;
    std::vector<plan::OptimizerChoice> optimizers_;
    // Roots by the degrees that exceed 1; their sets also by precision, and by whether vpp does.
    std::array<std::vector<plan::Plan>, 32> roots_;
    std::array<std::vector<stack::OpenRules>, 32> open_rules_; // rules that plans of each root can break
    std::array<std::vector<std::size_t>, 32> without_graphs_;
    std::map<machine::Precision, std::array<std::vector<RootSets>, 64>> sets_of_roots_;
    Rejections rejected_;
    std::vector<LayerOptions> families_;
    // What excludes all choices beside degrees, of fault_of_mapping(): tp, cp, ep, etp, and whether pp, dp and edp are
    // above 1.
    std::map<std::tuple<machine::Precision, int, int, int, int, bool, bool, bool>, plan::PlanFault> known_faults_;
    std::map<std::pair<int, int>, std::vector<StageSplit>> cuts_; // cuts by (pp, vpp)
};

} // namespace moe::search
