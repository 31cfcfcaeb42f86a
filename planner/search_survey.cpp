// The survey: every branch of a family with a floor of its step time, before anything of it is quoted.
#include "planner/error.hpp"
#include "planner/search_branch.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace moe {
namespace {

class Survey {
public:
    Survey(const SearchSpace& space, const Family& family, Quoter& quoter, bool exhaustive, Found& found)
        : space_(space), family_(family), quoter_(quoter), exhaustive_(exhaustive), found_(found) {}

    std::vector<Branch> run() {
        // Mappings whose groups lie alike on the machine share their layers; without a pipeline there are more choices.
        std::map<std::pair<int, bool>, std::vector<const Mapping*>> alike;
        for (const Mapping& mapping : family_.mappings) {
            const Plan plan = root_plan({&mapping}, 0, 1);
            if (!exhaustive_ && too_small(mapping, plan)) continue;
            alike[{quoter_.placement(plan), mapping.pp > 1}].push_back(&mapping);
        }
        for (const auto& [place, mappings] : alike) add_branches(mappings);
        return std::move(branches_);
    }

private:
    const std::vector<Plan>& roots(int pp) const {
        return space_.roots(family_.tp, family_.cp, family_.ep, family_.etp, pp);
    }
    std::int64_t choices() const {
        return static_cast<std::int64_t>(space_.recompute_sets().size() * space_.optimizers().size());
    }
    Plan root_plan(const BranchShape& shape, std::size_t root, std::int64_t mbs) const {
        Plan plan = plan_of(space_, {0.0, mbs, &family_, shape, static_cast<std::uint16_t>(root)});
        plan.recompute = 0;
        return plan;
    }

    bool too_large(double bytes) const {
        return bytes * (1.0 - quote_memory_margin) > space_.base().hardware->memory_bytes;
    }

    // Machines on which not even weights and optimizer states fit.
    bool too_small(const Mapping& mapping, Plan plan) {
        const std::vector<Plan>& all = roots(mapping.pp);
        plan.fsdp = std::any_of(all.begin(), all.end(), [](const Plan& root) { return root.fsdp; });
        const double bytes = least_bytes_[&mapping] = quoter_.least_bytes(plan);
        if (!too_large(bytes)) return false;
        std::int64_t cuts = 0;
        for (const int vpp : space_.chunk_counts(mapping.pp))
            cuts += static_cast<std::int64_t>(space_.cuts(mapping.pp, vpp).size());
        const auto others = static_cast<std::int64_t>(space_.micro_batch_sizes(mapping.dp).size() * all.size());
        found_.rejected.add({"memory", "memory"}, cuts * others * choices());
        plan.mbs = space_.micro_batch_sizes(mapping.dp).front();
        plan.recompute = space_.recompute_sets().back();
        found_.note(plan, bytes);
        return true;
    }

    void add_branches(const std::vector<const Mapping*>& mappings) {
        auto shapes = std::make_shared<std::vector<BranchShape>>();
        std::map<std::int64_t, std::vector<std::uint16_t>> divided; // shapes by micro-batch size
        for (const Mapping* mapping : mappings) {
            const std::vector<std::int64_t> sizes = space_.micro_batch_sizes(mapping->dp);
            for (const int vpp : space_.chunk_counts(mapping->pp))
                for (const Cut& cut : space_.cuts(mapping->pp, vpp)) {
                    for (const std::int64_t mbs : sizes)
                        divided[mbs].push_back(static_cast<std::uint16_t>(shapes->size()));
                    shapes->push_back({mapping, &cut, vpp});
                }
        }
        std::vector<Branch> branches;
        std::int64_t multiple = 1;
        for (auto& [mbs, indices] : divided) {
            branches.push_back({&family_, mbs, shapes, std::move(indices), {}, 0.0});
            drop_large(branches.back());
            if (branches.back().divided.empty())
                branches.pop_back();
            else
                multiple = std::lcm(multiple, mbs);
        }
        floors_.clear();
        for (Branch& branch : branches) add_branch(std::move(branch), multiple);
    }

    // Seconds below which no plan of the root goes with any micro-batch size that divides `multiple`: kernels, messages
    // and gathers of a larger micro-batch take no longer per sample. So one floor serves all sizes; what it leaves is
    // asked again by those who quote.
    double floor_of(Plan plan, std::size_t like, std::int64_t multiple) {
        const auto known = floors_.find(like);
        if (known != floors_.end()) return known->second;
        plan.mbs = multiple;
        return floors_[like] = quoter_.early_floor(plan);
    }

    // The first sound shape with one chunk per rank, and the first with several: what excludes a root in both does so
    // in all. A shape that is unsound even without choices says nothing about them.
    std::vector<BranchShape> typical(const Branch& branch) const {
        std::vector<BranchShape> result;
        for (const bool chunks : {false, true})
            for (const std::uint16_t s : branch.divided) {
                const BranchShape& shape = (*branch.shapes)[s];
                if ((shape.vpp > 1) != chunks) continue;
                Plan plan = space_.bare(root_plan(shape, 0, branch.mbs));
                if (space_.fault_of(plan)) continue;
                result.push_back(shape);
                break;
            }
        return result;
    }

    // Shapes with which the layers' inputs alone leave no room for weights and optimizer states; counted.
    void drop_large(Branch& branch) {
        if (exhaustive_ || splits_backward(space_.base().schedule)) return;
        const double kept = quoter_.kept_bytes(root_plan((*branch.shapes).front(), 0, branch.mbs));
        if (kept == 0.0) return;
        const std::size_t before = branch.divided.size();
        std::erase_if(branch.divided, [&](std::uint16_t s) {
            const BranchShape& shape = (*branch.shapes)[s];
            const double micro_batches = static_cast<double>(space_.base().gbs) / shape.mapping->dp / branch.mbs;
            const double share = std::min(1.0, micro_batches / shape.mapping->pp);
            const double bytes = least_bytes_[shape.mapping] + kept * shape.cut->mean_kept * share;
            if (!too_large(bytes)) return false;
            if (!found_.smallest || bytes < found_.least_memory) {
                Plan plan = root_plan(shape, 0, branch.mbs);
                plan.recompute = space_.recompute_sets().back();
                found_.note(plan, bytes);
            }
            return true;
        });
        const auto dropped = static_cast<std::int64_t>(before - branch.divided.size());
        const std::size_t count = roots((*branch.shapes).front().mapping->pp).size();
        found_.rejected.add({"memory", "memory"}, dropped * static_cast<std::int64_t>(count) * choices());
    }

    // What excludes a root with every shape, or nothing and a plan that is sound. A larger micro-batch excludes no root
    // that a smaller one allows but for what shapes tell without choices as well, so that it is asked once.
    PlanFault fault_of(const std::vector<BranchShape>& shapes, std::size_t root, std::int64_t mbs, Plan& plan) {
        PlanFault fault;
        for (const BranchShape& shape : shapes) {
            plan = root_plan(shape, root, mbs);
            std::optional<PlanFault>& known = faults_[{root, shape.vpp > 1, shape.mapping->pp > 1}];
            if (!known) known = space_.fault_of(plan);
            if (fault = *known; !fault) break;
        }
        return fault;
    }

    void add_branch(Branch branch, std::int64_t multiple) {
        const std::vector<BranchShape> shapes = typical(branch);
        const std::size_t count = roots((*branch.shapes).front().mapping->pp).size();
        // Without a sound shape the reasons are counted shape by shape, later.
        for (std::size_t r = 0; r < count; ++r) {
            const auto index = static_cast<std::uint16_t>(r);
            if (shapes.empty() || exhaustive_) {
                branch.roots.push_back({0.0, index, index});
                continue;
            }
            Plan plan;
            const PlanFault fault = fault_of(shapes, r, branch.mbs, plan);
            const std::int64_t each = candidates_of(space_, branch, 1);
            if (fault) {
                found_.rejected.add(fault, each);
                continue;
            }
            const std::size_t like = space_.without_graphs(family_.tp, family_.cp, family_.ep, family_.etp,
                                                           (*branch.shapes).front().mapping->pp)[r];
            const auto same = std::find_if(branch.roots.begin(), branch.roots.end(),
                                           [like](const Branch::Root& root) { return root.like == like; });
            if (same != branch.roots.end()) {
                branch.roots.push_back({same->floor, index, same->like});
                continue;
            }
            try {
                branch.roots.push_back({floor_of(plan, like, multiple), index, static_cast<std::uint16_t>(like)});
            } catch (const Error& error) {
                if (error.fault() != Fault::bad_input) throw;
                found_.rejected.add({"not priced", error.what()}, each);
            }
        }
        if (branch.roots.empty()) return;
        branch.floor = branch.roots.front().floor;
        for (const Branch::Root& root : branch.roots) branch.floor = std::min(branch.floor, root.floor);
        branches_.push_back(std::move(branch));
    }

    const SearchSpace& space_;
    const Family& family_;
    Quoter& quoter_;
    bool exhaustive_;
    Found& found_;
    std::map<const Mapping*, double> least_bytes_;
    std::map<std::tuple<std::size_t, bool, bool>, std::optional<PlanFault>> faults_; // by root, chunks, pipeline
    std::map<std::size_t, double> floors_; // by root without graphs, of the mappings at hand
    std::vector<Branch> branches_;
};

} // namespace

std::vector<Branch> survey(const SearchSpace& space, const Family& family, Quoter& quoter, bool exhaustive,
                           Found& found) {
    quoter.forget();
    return Survey(space, family, quoter, exhaustive, found).run();
}

} // namespace moe
