// Looks plans up by the texts of all their fields, and plays those that are new side by side.
#include "planner/search/played_plans.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"

#include <utility>

namespace moe::search {
namespace {

std::string text_of(const plan::Plan& plan) {
    std::string text;
    for (const std::string& field : plan::field_names()) text += plan::field_text(plan, field) + '\n';
    return text;
}

} // namespace

std::optional<Estimate> PlayedPlans::play(const plan::Plan& plan) const {
    try {
        if (estimator_.memory_bytes(plan) <= plan.hardware->memory_bytes) return estimator_.play(plan);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
    }
    return std::nullopt;
}

std::vector<std::optional<Estimate>> PlayedPlans::of(const std::vector<plan::Plan>& plans) {
    std::vector<const std::optional<Estimate>*> entries;
    std::vector<std::pair<const plan::Plan*, std::optional<Estimate>*>> unknown;
    for (const plan::Plan& plan : plans) {
        const auto [entry, fresh] = known_.try_emplace(text_of(plan));
        if (fresh) unknown.emplace_back(&plan, &entry->second);
        entries.push_back(&entry->second);
    }
    workers_.run(unknown.size(), [&](std::size_t, std::size_t i) { *unknown[i].second = play(*unknown[i].first); });
    std::vector<std::optional<Estimate>> result;
    result.reserve(entries.size());
    for (const std::optional<Estimate>* entry : entries) result.push_back(*entry);
    return result;
}

} // namespace moe::search
