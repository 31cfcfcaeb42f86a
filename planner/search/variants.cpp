// Varies plans by the choices that exploration leaves out.
#include "planner/search/variants.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/cuts.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace moe::search {
namespace {

constexpr int most_variant_steps = 8; // of best_variant(): more than there are choices that add up

// Step seconds; infinite where the plan has no price.
double bound_of(const plan::Plan& plan, BoundModel& bounds) {
    try {
        return bounds.bound(bounds.layer_costs(plan), bounds.stage_split(plan)).step_seconds;
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return std::numeric_limits<double>::infinity();
    }
}

void cut_into(const plan::Plan& plan, int vpp, const std::string& own, const stack::Stack& stack,
              std::vector<plan::Plan>& result) {
    for (const std::vector<plan::Stage>& cut : plan::recipe_cuts(*plan.model, plan.pp * vpp)) {
        plan::Plan other = plan;
        other.vpp = vpp;
        other.schedule = vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
        other.layout = plan::layout_to_string(cut);
        if (other.layout != own && stack::sound(other, stack)) result.push_back(std::move(other));
    }
}

// Whether wgrad in FP8 gains anything depends on how many rows each expert has: only measured calls can say it.
bool measures_fp8_wgrad(const machine::Hardware& hardware) {
    return hardware.measured.count("grouped_gemm.wgrad.fp8-blockwise") > 0;
}

// Rows as they are routed: without capacity and stash, and without a graph of the whole step, which needs both.
void as_routed(plan::Plan plan, const stack::Stack& stack, const std::set<std::string>& pinned,
               std::vector<plan::Plan>& result) {
    plan.capacity = 0.0;
    if (!pinned.contains("paged_stash")) plan.paged_stash = false;
    for (const plan::CudaGraph graph : stack.cuda_graphs) {
        if (graph == plan::CudaGraph::full || (pinned.contains("cuda_graph") && graph != plan.cuda_graph)) continue;
        plan.cuda_graph = graph;
        if (stack::sound(plan, stack)) result.push_back(plan);
    }
}

} // namespace

std::vector<Variation> variations(const stack::Stack& stack) {
    std::vector<Variation> result{{"delay_wgrad", {"off", "on"}}};
    if (plan::stack_traits(stack.name).quantizes_by_rows) result.push_back({"fp8_wgrad", {"off", "on"}});
    if (!stack.executable) result.push_back({"fsdp", {"off", "on"}});
    for (const auto& [field, values] : stack.recipe_choices) {
        result.push_back({field, {plan::field_text(plan::Plan{}, field)}});
        result.back().values.insert(result.back().values.end(), values.begin(), values.end());
    }
    return result;
}

std::vector<plan::Plan> recut(const plan::Plan& plan, const stack::Stack& stack, const std::set<std::string>& pinned) {
    std::vector<plan::Plan> result;
    if (plan.pp == 1 || pinned.contains("layout") || plan::splits_backward(plan.schedule)) return result;
    const std::string own = plan::layout_to_string(plan::stages(plan));
    cut_into(plan, plan.vpp, own, stack, result);
    if (pinned.contains("vpp") || pinned.contains("schedule") || !stack.interleaved) return result;
    const int parts = static_cast<int>(plan.model->layers.size() + plan.model->mtp.size()) + 2;
    for (int vpp = 1; plan.pp * vpp <= parts; ++vpp)
        if (vpp != plan.vpp && parts % (plan.pp * vpp) == 0) cut_into(plan, vpp, own, stack, result);
    return result;
}

std::vector<plan::Plan> variants(const plan::Plan& plan, const stack::Stack& stack,
                                 const std::set<std::string>& pinned) {
    std::vector<plan::Plan> result = recut(plan, stack, pinned);
    for (const Variation& variation : variations(stack)) {
        const std::string& field = variation.field;
        if (pinned.contains(field) || (field == "fsdp" && plan.pp == 1)) continue;
        if (field == "fp8_wgrad" && !measures_fp8_wgrad(*plan.hardware)) continue;
        for (const std::string& value : variation.values) {
            plan::Plan other = plan;
            plan::set_field(other, field, value);
            if (plan::differences(plan, other).empty()) continue;
            if (stack::sound(other, stack)) result.push_back(std::move(other));
        }
    }
    if (plan.capacity > 0.0 && !pinned.contains("capacity")) as_routed(plan, stack, pinned, result);
    return result;
}

std::vector<plan::Plan> split_backwards(const plan::Plan& found, const stack::Stack& stack,
                                        const std::set<std::string>& pinned) {
    std::vector<plan::Plan> result;
    if (pinned.contains("schedule") || found.pp == 1) return result;
    for (const plan::ScheduleKind kind : stack.split_schedules) {
        const int chunks = plan::in_a_v(kind) ? 2 : 1;
        if (pinned.contains("vpp") && found.vpp != chunks) continue;
        plan::Plan plan = found;
        plan.schedule = kind;
        plan.vpp = chunks;
        // Schedules other than DualPipeV have no whole backwards for a forward to run beside.
        if (kind != plan::ScheduleKind::dualpipe_v && !pinned.contains("ep_overlap")) plan.ep_overlap = false;
        if (pinned.contains("layout")) {
            if (stack::sound(plan, stack)) result.push_back(std::move(plan));
            continue;
        }
        for (plan::Plan& cut : stack::sound_cuts(plan, stack)) result.push_back(std::move(cut));
    }
    return result;
}

std::optional<plan::Plan> best_variant(const plan::Plan& plan, const stack::Stack& stack,
                                       const std::set<std::string>& pinned, Estimator& estimator, BoundModel& bounds,
                                       double gain) {
    double seconds = bound_of(plan, bounds);
    std::optional<plan::Plan> best;
    for (int step = 0; step < most_variant_steps; ++step) {
        std::vector<std::pair<double, plan::Plan>> found;
        for (plan::Plan& other : variants(best ? *best : plan, stack, pinned))
            if (const double bound = bound_of(other, bounds); bound < (1.0 - gain) * seconds)
                found.emplace_back(bound, std::move(other));
        std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        const auto fits = std::find_if(found.begin(), found.end(), [&](const auto& one) {
            return estimator.memory_bytes(one.second) <= one.second.hardware->memory_bytes;
        });
        if (fits == found.end()) break;
        seconds = fits->first;
        best = std::move(fits->second);
    }
    return best;
}

} // namespace moe::search
