// Tries, mapping by mapping, what spares memory, in the order of what cannot be spared.
#include "planner/search/thrifty.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <limits>
#include <memory>

namespace moe::search {
namespace {

constexpr std::size_t most_looked_at = 200;  // most mappings
constexpr std::int64_t most_node_steps = 64; // steps of whole nodes, from one power of two to the next

// Bytes of a sound plan; infinite for what has no price.
double bytes_of_plan(const plan::Plan& plan, Estimator& estimator) {
    try {
        return estimator.memory_bytes(plan);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return std::numeric_limits<double>::infinity();
    }
}

// Whether the host's memory holds what the plan offloads, which closed forms do not count.
bool host_holds(const plan::Plan& plan, Estimator& estimator) {
    if (plan.offload == 0) return true;
    try {
        return estimator.play(plan).fits;
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return false;
    }
}

// One mapping's plan while it gets thriftier.
class Saver {
public:
    Saver(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator, plan::Plan plan, double enough)
        : space_(space), stack_(stack), estimator_(estimator), enough_(enough) {
        found_.plan = std::move(plan);
        found_.bytes = bytes_of_plan(found_.plan, estimator_);
    }

    Thrifty run(const std::vector<StageSplit>& cuts) {
        for (const StageSplit& cut : cuts) attempt([&](plan::Plan& plan) { plan.layout = cut.layout; });
        recompute();
        if (!space_.pinned("ep_overlap") && found_.plan.ep_overlap)
            attempt([](plan::Plan& plan) { plan.ep_overlap = false; });
        if (!space_.pinned("cuda_graph")) attempt([](plan::Plan& plan) { plan.cuda_graph = plan::CudaGraph::none; });
        if (!space_.pinned("fsdp") && !stack_.executable && found_.plan.pp == 1)
            attempt([](plan::Plan& plan) { plan.fsdp = !plan.fsdp; });
        if (stack_.offloads && !space_.pinned("offload") && !found_.plan.hardware->cpu) offload();
        return std::move(found_);
    }

private:
    template <class Change>
    void attempt(const Change& change) {
        if (found_.bytes <= enough_) return;
        plan::Plan plan = found_.plan;
        change(plan);
        if (space_.fault_of(plan)) return;
        const double bytes = bytes_of_plan(plan, estimator_);
        if (bytes < found_.bytes) found_ = {std::move(plan), bytes};
    }

    // `full` keeps the inputs of layers alone, but works in all of one layer; the most modules otherwise work in less.
    void recompute() {
        if (space_.pinned("recompute")) return;
        const std::vector<unsigned>& sets = space_.recompute_sets();
        int tried = 0;
        for (auto set = sets.rbegin(); set != sets.rend() && tried < 3; ++set, ++tried)
            attempt([&](plan::Plan& plan) { plan.recompute = *set; });
    }

    void offload() {
        unsigned activations = 0;
        for (unsigned module = 1; module < plan::offload::optimizer; module *= 2) {
            plan::Plan plan = found_.plan;
            plan.offload = activations | module;
            if (!space_.fault_of(plan)) activations |= module;
        }
        const auto with = [&](unsigned set, bool recomputes) {
            attempt([&](plan::Plan& plan) {
                plan.offload = set;
                if (!recomputes) plan.recompute = 0;
            });
        };
        with(plan::offload::optimizer, true);
        with(activations, true);
        with(activations | plan::offload::optimizer, true);
        if (!space_.pinned("recompute")) with(activations | plan::offload::optimizer, false);
    }

    const SearchSpace& space_;
    const stack::Stack& stack_;
    Estimator& estimator_;
    double enough_;
    Thrifty found_;
};

struct Mapping {
    const LayerOptions* family;
    const ParallelConfig* config;
    double least; // fewest bytes, whatever is chosen
};

// All mappings, those first that need least; those that need more than `most` are left out.
std::vector<Mapping> by_need(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator, double most) {
    const std::unique_ptr<BoundModel> bounds = estimator.bound_model();
    std::vector<Mapping> mappings;
    for (const LayerOptions& family : space.layer_options())
        for (const ParallelConfig& config : family.parallel_configs) {
            plan::Plan plan = space.candidate(family, config, space.chunk_counts(config.pp).front(),
                                              space.micro_batch_sizes(config.dp).front());
            if (!space.pinned("fsdp") && !stack.executable && plan.pp == 1) plan.fsdp = true;
            if (!space.pinned("offload") && stack.offloads && !plan.hardware->cpu)
                plan.offload = plan::offload::optimizer;
            const double least = bounds->least_bytes(plan) * (1.0 - bound_memory_margin);
            if (least <= most) mappings.push_back({&family, &config, least});
        }
    std::stable_sort(mappings.begin(), mappings.end(),
                     [](const Mapping& a, const Mapping& b) { return a.least < b.least; });
    return mappings;
}

} // namespace

std::optional<Thrifty> thriftiest(const SearchSpace& space, const LayerOptions& family, const ParallelConfig& mapping,
                                  const stack::Stack& stack, Estimator& estimator, plan::PlanFault& fault,
                                  double enough) {
    const int vpp = space.chunk_counts(mapping.pp).front();
    plan::Plan plan = space.candidate(family, mapping, vpp, space.micro_batch_sizes(mapping.dp).front());
    plan.layout = space.stage_splits(mapping.pp, vpp).front().layout;
    plan.recompute = space.recompute_sets().back();
    fault = space.settle(plan);
    if (fault) return std::nullopt;
    Thrifty found = Saver(space, stack, estimator, std::move(plan), enough).run(space.stage_splits(mapping.pp, vpp));
    if (found.bytes == std::numeric_limits<double>::infinity()) return std::nullopt;
    return found;
}

std::optional<Thrifty> thriftiest(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator) {
    std::optional<Thrifty> best;
    std::size_t left = most_looked_at;
    for (const Mapping& mapping : by_need(space, stack, estimator, std::numeric_limits<double>::infinity())) {
        if (left-- == 0 || (best && mapping.least >= best->bytes)) break;
        plan::PlanFault fault;
        std::optional<Thrifty> found = thriftiest(space, *mapping.family, *mapping.config, stack, estimator, fault);
        if (found && (!best || found->bytes < best->bytes)) best = std::move(found);
    }
    return best;
}

std::optional<plan::Plan> fitting_plan(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator) {
    const double memory = space.base().hardware->memory_bytes;
    std::size_t left = most_looked_at;
    for (const Mapping& mapping : by_need(space, stack, estimator, memory)) {
        if (left-- == 0) break;
        plan::PlanFault fault;
        std::optional<Thrifty> found =
            thriftiest(space, *mapping.family, *mapping.config, stack, estimator, fault, memory);
        if (found && found->bytes <= memory && host_holds(found->plan, estimator)) return std::move(found->plan);
    }
    return std::nullopt;
}

std::optional<plan::Plan> fitting_plan(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    return fitting_plan(SearchSpace(request, stack), stack, estimator);
}

SearchRequest with_gpus(const SearchRequest& request, std::int64_t gpus) {
    SearchRequest other = request;
    other.base.gpus = static_cast<int>(gpus);
    other.progress = nullptr;
    return other;
}

std::optional<std::pair<int, plan::Plan>> fewest_gpus(const SearchRequest& request, const stack::Stack& stack,
                                                      Estimator& estimator, std::int64_t from, std::int64_t to) {
    const machine::Hardware& hardware = *request.base.hardware;
    const std::int64_t node = hardware.cpu ? 1 : hardware.gpus_per_node;
    const std::int64_t most = std::min<std::int64_t>(to, plan::limits::max_gpus);
    for (std::int64_t gpus = 1; gpus <= most;) {
        if (gpus >= from)
            if (std::optional<plan::Plan> plan = fitting_plan(with_gpus(request, gpus), stack, estimator))
                return std::pair(static_cast<int>(gpus), std::move(*plan));
        std::int64_t next = gpus + node * std::max<std::int64_t>(1, gpus / (node * most_node_steps));
        if (gpus < node)
            for (next = gpus + 1; node % next != 0;) ++next;
        gpus = next;
    }
    return std::nullopt;
}

} // namespace moe::search
