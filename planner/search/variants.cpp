// Varies plans by the choices that exploration leaves out.
#include "planner/search/variants.hpp"

#include "planner/model/model.hpp"
#include "planner/plan/cuts.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/stack.hpp"

#include <utility>

namespace moe::search {
namespace {

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

} // namespace

std::vector<Variation> variations(const stack::Stack& stack) {
    std::vector<Variation> result{{"delay_wgrad", {"off", "on"}}};
    if (!stack.executable) result.push_back({"fsdp", {"off", "on"}});
    for (const auto& [field, values] : stack.recipe_choices) result.push_back({field, values});
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
        const std::string own = plan::field_text(plan, field);
        std::vector<std::string> values = variation.values;
        if (plan::field_text(plan::Plan{}, field) != own) values.push_back(plan::field_text(plan::Plan{}, field));
        for (const std::string& value : values) {
            if (value == own) continue;
            plan::Plan other = plan;
            plan::set_field(other, field, value);
            if (plan::field_text(other, field) != own && stack::sound(other, stack)) result.push_back(std::move(other));
        }
    }
    return result;
}

} // namespace moe::search
