// Looks for the thriftiest plan of a request, of every mapping of it, and of requests one change away.
#include "planner/search/feasibility.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <map>

namespace moe::search {
namespace {

constexpr std::size_t most_shown = 10;

// The plan of a changed request, empty where the change is impossible in itself.
std::optional<plan::Plan> plan_of(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    try {
        return fitting_plan(request, stack, estimator);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return std::nullopt;
    }
}

class Remedies {
public:
    Remedies(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator)
        : request_(request), stack_(stack), estimator_(estimator) {
        request_.progress = nullptr;
    }

    std::vector<Remedy> find() {
        gpus();
        fixed();
        number("gbs", &plan::Plan::gbs, plan::limits::max_gbs);
        shorter();
        other_precision();
        for (const auto& [field, value] : {std::pair{"optimizer", "adamw+bf16_moments"},
                                           {"gradients", "bf16"},
                                           {"fsdp", "on"},
                                           {"offload", "optimizer"},
                                           {"cuda_graph", "none"}})
            choice(field, value);
        return std::move(found_);
    }

private:
    bool try_it(const SearchRequest& request, const std::string& what, const std::string& from, const std::string& to) {
        const std::optional<plan::Plan> plan = plan_of(request, stack_, estimator_);
        if (!plan) return false;
        found_.push_back({what, from, to, *plan, estimator_.memory_bytes(*plan)});
        return true;
    }

    // Memory needs more of them, divisibility a neighbour.
    void gpus() {
        const std::int64_t now = request_.base.gpus;
        if (const auto more = fewest_gpus(request_, stack_, estimator_, now + 1, 64 * now))
            found_.push_back({"gpus", fmt::format("{}", now), fmt::format("{}", more->first), more->second,
                              estimator_.memory_bytes(more->second)});
        if (has_plan(request_, stack_)) return;
        for (std::int64_t distance = 1; distance <= 64; ++distance)
            for (const std::int64_t near : {now - distance, now + distance})
                if (near >= 1 && near <= plan::limits::max_gpus && has_plan(with_gpus(request_, near), stack_) &&
                    try_it(with_gpus(request_, near), "gpus", fmt::format("{}", now), fmt::format("{}", near)))
                    return;
    }

    void fixed() {
        for (std::size_t i = 0; i < request_.fixed.size(); ++i) {
            SearchRequest open = request_;
            open.fixed.erase(open.fixed.begin() + static_cast<std::ptrdiff_t>(i));
            try_it(open, "fix " + request_.fixed[i].first, request_.fixed[i].second, "open");
        }
    }

    // A workload's number that divisibility may want otherwise: the nearest that does.
    void number(const char* name, std::int64_t plan::Plan::*field, std::int64_t most) {
        if (has_plan(request_, stack_)) return;
        const std::int64_t now = request_.base.*field;
        for (std::int64_t distance = 1; distance <= 64; ++distance)
            for (const std::int64_t near : {now + distance, now - distance}) {
                SearchRequest other = request_;
                other.base.*field = near;
                if (near >= 1 && near <= most && has_plan(other, stack_) &&
                    try_it(other, name, fmt::format("{}", now), fmt::format("{}", near)))
                    return;
            }
    }

    void shorter() {
        for (std::int64_t seq = request_.base.seq / 2; seq >= 256; seq /= 2) {
            SearchRequest other = request_;
            other.base.seq = seq;
            if (try_it(other, "seq", fmt::format("{}", request_.base.seq), fmt::format("{}", seq))) return;
        }
    }

    void other_precision() {
        for (const machine::Precision precision : stack_.precisions) {
            if (precision == machine::Precision::fp32 || request_.base.emulates(precision)) continue;
            if (std::count(request_.precisions.begin(), request_.precisions.end(), precision) != 0) continue;
            if (request_.precisions.empty() && precision == machine::Precision::bf16) continue;
            SearchRequest other = request_;
            other.precisions = {precision};
            const std::string from =
                request_.precisions.empty() ? "bf16" : machine::to_string(request_.precisions.front());
            try_it(other, "precision", from, machine::to_string(precision));
        }
    }

    void choice(const std::string& field, const std::string& value) {
        for (const auto& [name, fixed] : request_.fixed)
            if (name == field) return;
        SearchRequest other = request_;
        other.fixed.emplace_back(field, value);
        try_it(other, field, plan::field_text(request_.base, field), value);
    }

    SearchRequest request_;
    const stack::Stack& stack_;
    Estimator& estimator_;
    std::vector<Remedy> found_;
};

} // namespace

bool has_plan(const SearchRequest& request, const stack::Stack& stack) {
    const SearchSpace space(request, stack);
    for (const LayerOptions& family : space.layer_options())
        for (const ParallelConfig& mapping : family.parallel_configs)
            for (const std::int64_t mbs : space.micro_batch_sizes(mapping.dp)) {
                const int vpp = space.chunk_counts(mapping.pp).front();
                plan::Plan plan = space.candidate(family, mapping, vpp, mbs);
                plan.layout = space.stage_splits(mapping.pp, vpp).front().layout;
                if (!space.settle(plan)) return true;
            }
    return false;
}

Infeasibility explain_request(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    const SearchSpace space(request, stack);
    Infeasibility result;
    Rejections rejected = space.rejected();
    for (const LayerOptions& family : space.layer_options())
        for (const ParallelConfig& mapping : family.parallel_configs) {
            std::int64_t candidates = 0;
            for (const int vpp : space.chunk_counts(mapping.pp))
                candidates += static_cast<std::int64_t>(space.stage_splits(mapping.pp, vpp).size());
            candidates *= static_cast<std::int64_t>(space.micro_batch_sizes(mapping.dp).size()) *
                          space.choices(family.tp, family.cp, family.ep, family.etp, mapping.pp);
            plan::PlanFault fault;
            const std::optional<Thrifty> found = thriftiest(space, family, mapping, stack, estimator, fault);
            if (fault) rejected.add(fault, candidates);
            if (!found || found->bytes <= found->plan.hardware->memory_bytes) continue;
            const plan::Plan& plan = found->plan;
            rejected.add({"memory", fmt::format("tp {} cp {} pp {} ep {} etp {} needs {:.1f} GiB at least, the machine "
                                                "has {:.1f}",
                                                plan.tp, plan.cp, plan.pp, plan.ep, plan.etp, found->bytes / 0x1p30,
                                                plan.hardware->memory_bytes / 0x1p30)},
                         candidates);
            result.closest.push_back({plan, found->bytes});
        }
    std::stable_sort(result.closest.begin(), result.closest.end(),
                     [](const TightConfig& a, const TightConfig& b) { return a.memory_bytes < b.memory_bytes; });
    if (result.closest.size() > most_shown) result.closest.resize(most_shown);
    for (const auto& [constraint, reason] : rejected.reasons)
        result.obstacles.push_back({constraint, reason.count, reason.message});
    std::stable_sort(result.obstacles.begin(), result.obstacles.end(),
                     [](const Obstacle& a, const Obstacle& b) { return a.candidates > b.candidates; });
    result.remedies = Remedies(request, stack, estimator).find();
    return result;
}

} // namespace moe::search
