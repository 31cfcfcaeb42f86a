// The survey: every branch of a family with a floor of its step time, before anything of it is bounded.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/search/search_branch.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace moe::search {
namespace {

class Survey {
public:
    Survey(const SearchSpace& space, const LayerOptions& family, BoundModel& bound_model, bool exhaustive, Found& found)
        : space_(space), family_(family), bound_model_(bound_model), exhaustive_(exhaustive), found_(found) {}

    std::vector<SearchNode> run() {
        // Mappings whose groups lie alike on the machine share their layers; without a pipeline there are more choices.
        std::map<std::pair<int, bool>, std::vector<const ParallelConfig*>> alike;
        for (const ParallelConfig& mapping : family_.parallel_configs) {
            const int vpp = space_.chunk_counts(mapping.pp).front();
            const StageSplit& cut =
                space_.stage_splits(mapping.pp, vpp).back(); // More stages than layers have no even split.
            const plan::Plan plan = root_plan({&mapping, &cut, vpp}, 0, 1);
            if (!exhaustive_ && cut.possible && too_small(mapping, plan)) continue;
            alike[{bound_model_.placement(plan), mapping.pp > 1}].push_back(&mapping);
        }
        for (const auto& [place, mappings] : alike) add_branches(mappings);
        return std::move(branches_);
    }

private:
    const std::vector<plan::Plan>& roots(int pp) const {
        return space_.roots(family_.tp, family_.cp, family_.ep, family_.etp, pp);
    }
    std::int64_t choices() const {
        return static_cast<std::int64_t>(space_.recompute_sets().size() * space_.optimizers().size());
    }
    plan::Plan root_plan(const NodeShape& shape, std::size_t root, std::int64_t mbs) const {
        plan::Plan plan = plan_of(space_, {0.0, mbs, &family_, shape, static_cast<std::uint16_t>(root)});
        plan.recompute = 0;
        return plan;
    }

    bool too_large(double bytes) const {
        return bytes * (1.0 - bound_memory_margin) > space_.base().hardware->memory_bytes;
    }

    // Machines on which not even weights and optimizer states fit.
    bool too_small(const ParallelConfig& mapping, plan::Plan plan) {
        const std::vector<plan::Plan>& all = roots(mapping.pp);
        plan.fsdp = std::any_of(all.begin(), all.end(), [](const plan::Plan& root) { return root.fsdp; });
        const double bytes = least_bytes_[&mapping] = bound_model_.least_bytes(plan);
        if (!too_large(bytes)) return false;
        std::int64_t cuts = 0;
        for (const int vpp : space_.chunk_counts(mapping.pp))
            cuts += static_cast<std::int64_t>(space_.stage_splits(mapping.pp, vpp).size());
        const auto others = static_cast<std::int64_t>(space_.micro_batch_sizes(mapping.dp).size() * all.size());
        found_.rejected.add({"memory", "memory"}, cuts * others * choices());
        plan.mbs = space_.micro_batch_sizes(mapping.dp).front();
        plan.recompute = space_.recompute_sets().back();
        note(plan, bytes);
        return true;
    }

    // A plan tells how much memory would do where memory alone excludes it.
    void note(const plan::Plan& plan, double bytes) {
        if (found_.smallest && bytes >= found_.least_memory) return;
        plan::Plan sound = plan;
        if (!space_.settle(sound)) found_.note(sound, bytes);
    }

    void add_branches(const std::vector<const ParallelConfig*>& mappings) {
        auto shapes = std::make_shared<std::vector<NodeShape>>();
        std::map<std::int64_t, std::vector<std::uint16_t>> divided; // shapes by micro-batch size
        for (const ParallelConfig* mapping : mappings) {
            const std::vector<std::int64_t> sizes = space_.micro_batch_sizes(mapping->dp);
            for (const int vpp : space_.chunk_counts(mapping->pp))
                for (const StageSplit& cut : space_.stage_splits(mapping->pp, vpp)) {
                    for (const std::int64_t mbs : sizes)
                        divided[mbs].push_back(static_cast<std::uint16_t>(shapes->size()));
                    shapes->push_back({mapping, &cut, vpp});
                }
        }
        std::vector<SearchNode> branches;
        std::int64_t multiple = 1;
        for (auto& [mbs, indices] : divided) {
            branches.push_back({&family_, mbs, shapes, std::move(indices), {}, 0.0});
            drop_large(branches.back());
            if (branches.back().divided.empty())
                branches.pop_back();
            else
                multiple = std::lcm(multiple, mbs);
        }
        std::map<std::pair<bool, bool>, Roots> asked; // roots by whether typical shapes have several chunks
        for (SearchNode& branch : branches) add_branch(std::move(branch), asked, multiple);
        for (const auto& [chunks, answer] : asked)
            for (const plan::PlanFault& fault : answer.faults) found_.rejected.add(fault, answer.candidates);
    }

    // The roots of branches that differ in the micro-batch size alone. A floor: seconds below which no plan of the root
    // goes with any size that divides the one asked for, since kernels, messages and gathers of a larger micro-batch
    // take no longer per sample. Roots that it leaves are asked again when their plans are bounded.
    struct Roots {
        std::vector<SearchNode::Root> sound;
        std::vector<plan::PlanFault> faults; // faults of the other roots
        std::int64_t candidates = 0;         // candidates of each root, in all those branches
    };

    // The first sound shape with one chunk per rank, and the first with several: what excludes a root in both does so
    // in all. A shape whose degrees are unsound says nothing about choices.
    std::vector<NodeShape> typical(const SearchNode& branch) const {
        std::vector<NodeShape> result;
        for (const bool chunks : {false, true})
            for (const std::uint16_t s : branch.divided) {
                const NodeShape& shape = (*branch.shapes)[s];
                if ((shape.vpp > 1) != chunks) continue;
                if (space_.fault_of_degrees(root_plan(shape, 0, branch.mbs))) continue;
                result.push_back(shape);
                break;
            }
        return result;
    }

    // Shapes with which the layers' inputs alone leave no room for weights and optimizer states; counted.
    void drop_large(SearchNode& branch) {
        if (exhaustive_ || plan::splits_backward(space_.base().schedule)) return;
        const double kept = bound_model_.kept_bytes(root_plan((*branch.shapes).front(), 0, branch.mbs));
        if (kept == 0.0) return;
        const std::size_t before = branch.divided.size();
        std::erase_if(branch.divided, [&](std::uint16_t s) {
            const NodeShape& shape = (*branch.shapes)[s];
            const double micro_batches =
                static_cast<double>(space_.base().gbs) / shape.parallel_config->dp / branch.mbs;
            const double share = std::min(1.0, micro_batches / shape.parallel_config->pp);
            const double bytes = least_bytes_[shape.parallel_config] + kept * shape.stage_split->mean_kept * share;
            if (!too_large(bytes)) return false;
            plan::Plan plan = root_plan(shape, 0, branch.mbs);
            plan.recompute = space_.recompute_sets().back();
            note(plan, bytes);
            return true;
        });
        const auto dropped = static_cast<std::int64_t>(before - branch.divided.size());
        const std::size_t count = roots((*branch.shapes).front().parallel_config->pp).size();
        found_.rejected.add({"memory", "memory"}, dropped * static_cast<std::int64_t>(count) * choices());
    }

    // The fault that excludes a root with every shape, or nothing and a plan that is sound. A larger micro-batch
    // excludes no root that a smaller one allows but for what shapes tell without choices as well, so that it is asked
    // once.
    plan::PlanFault fault_of(const std::vector<NodeShape>& shapes, std::size_t root, std::int64_t mbs,
                             plan::Plan& plan) {
        plan::PlanFault fault;
        for (const NodeShape& shape : shapes) {
            plan = root_plan(shape, root, mbs);
            std::optional<plan::PlanFault>& known = faults_[{root, shape.vpp > 1, shape.parallel_config->pp > 1}];
            if (!known) known = space_.fault_of(plan, root);
            if (fault = *known; !fault) break;
        }
        return fault;
    }

    // Nothing, and the reason, for what cannot be priced.
    std::optional<double> floor_of(plan::Plan plan, std::int64_t mbs, std::string& reason) {
        plan.mbs = mbs;
        try {
            return bound_model_.early_step_bound(plan);
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
            reason = error.what();
            return std::nullopt;
        }
    }

    // The roots that are sound with one of these shapes, with their floors.
    void ask_roots(Roots& asked, const SearchNode& branch, const std::vector<NodeShape>& shapes,
                   std::int64_t multiple) {
        const int pp = (*branch.shapes).front().parallel_config->pp;
        const std::vector<std::size_t>& without_graphs =
            space_.without_graphs(family_.tp, family_.cp, family_.ep, family_.etp, pp);
        for (std::size_t r = 0; r < roots(pp).size(); ++r) {
            plan::Plan plan;
            if (const plan::PlanFault fault = fault_of(shapes, r, branch.mbs, plan)) {
                asked.faults.push_back(fault);
                continue;
            }
            const auto index = static_cast<std::uint16_t>(r), like = static_cast<std::uint16_t>(without_graphs[r]);
            const auto same = std::find_if(asked.sound.begin(), asked.sound.end(),
                                           [like](const SearchNode::Root& root) { return root.like == like; });
            if (same != asked.sound.end()) {
                asked.sound.push_back({same->floor, index, like});
                continue;
            }
            // A size that nobody has may be one too many, and is no reason to leave out the others.
            std::string reason;
            std::optional<double> floor = floor_of(plan, multiple, reason);
            if (!floor && floor_of(plan, branch.mbs, reason)) floor = 0.0;
            if (floor)
                asked.sound.push_back({*floor, index, like});
            else
                asked.faults.push_back({"not priced", reason});
        }
    }

    void add_branch(SearchNode branch, std::map<std::pair<bool, bool>, Roots>& asked, std::int64_t multiple) {
        const std::vector<NodeShape> shapes = typical(branch);
        if (shapes.empty() || exhaustive_) {
            // The reasons are counted shape by shape, later, where no shape is sound.
            const std::size_t count = roots((*branch.shapes).front().parallel_config->pp).size();
            for (std::size_t r = 0; r < count; ++r)
                branch.roots.push_back({0.0, static_cast<std::uint16_t>(r), static_cast<std::uint16_t>(r)});
        } else {
            const auto [at, fresh] = asked.try_emplace({shapes.front().vpp > 1, shapes.back().vpp > 1});
            if (fresh) ask_roots(at->second, branch, shapes, multiple);
            at->second.candidates += candidates_of(space_, branch, 1);
            branch.roots = at->second.sound;
        }
        if (branch.roots.empty()) return;
        branch.floor = branch.roots.front().floor;
        for (const SearchNode::Root& root : branch.roots) branch.floor = std::min(branch.floor, root.floor);
        branches_.push_back(std::move(branch));
    }

    const SearchSpace& space_;
    const LayerOptions& family_;
    BoundModel& bound_model_;
    bool exhaustive_;
    Found& found_;
    std::map<const ParallelConfig*, double> least_bytes_;
    std::map<std::tuple<std::size_t, bool, bool>, std::optional<plan::PlanFault>> faults_; // (root, chunks, pipeline)
    std::vector<SearchNode> branches_;
};

} // namespace

std::vector<SearchNode> survey(const SearchSpace& space, const LayerOptions& family, BoundModel& bound_model,
                               bool exhaustive, Found& found) {
    bound_model.forget();
    return Survey(space, family, bound_model, exhaustive, found).run();
}

} // namespace moe::search
