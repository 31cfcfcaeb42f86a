// Marks the layers that stay in BF16 as kinds of their own, so that all that goes by kind tells them apart.
#include "planner/plan/bf16_layers.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <charconv>

namespace moe::plan {
namespace {

int kind_in(model::Model& model, model::LayerKind kind, bool bf16) {
    kind.bf16 = bf16;
    const auto found = std::find(model.kinds.begin(), model.kinds.end(), kind);
    if (found == model.kinds.end()) model.kinds.push_back(kind);
    return static_cast<int>(std::find(model.kinds.begin(), model.kinds.end(), kind) - model.kinds.begin());
}

} // namespace

void keep_in_bf16(Plan& plan, int first, int last) {
    const model::Model& model = *plan.model;
    const int layers = static_cast<int>(model.layers.size());
    if (first < 0 || last < 0 || first > layers || last > layers - first)
        refuse("bf16_layers={}+{}: {} has {} layers", first, last, model.name, layers);
    const auto marked = std::make_shared<model::Model>(model);
    marked->kinds.clear();
    for (int layer = 0; layer < layers; ++layer)
        marked->layers[static_cast<std::size_t>(layer)] =
            kind_in(*marked, model.kind_of(layer), layer < first || layer >= layers - last);
    for (int& kind : marked->mtp) kind = kind_in(*marked, model.kinds[static_cast<std::size_t>(kind)], false);
    plan.model = marked;
    plan.bf16_first = first;
    plan.bf16_last = last;
}

std::string bf16_layers_to_string(const Plan& plan) {
    if (plan.bf16_first == 0 && plan.bf16_last == 0) return "none";
    return fmt::format("{}+{}", plan.bf16_first, plan.bf16_last);
}

void bf16_layers_from_string(Plan& plan, const std::string& text) {
    if (text == "none") return keep_in_bf16(plan, 0, 0);
    int first = 0, last = 0;
    const char* const end = text.data() + text.size();
    const auto [plus, fault] = std::from_chars(text.data(), end, first);
    const bool more = fault == std::errc{} && plus < end && *plus == '+';
    const auto [at, wrong] = more ? std::from_chars(plus + 1, end, last) : std::from_chars_result{end, fault};
    if (!more || wrong != std::errc{} || at != end)
        refuse("bf16_layers={}: must be none, or layers at the start and at the end as in 1+1", shown(text));
    keep_in_bf16(plan, first, last);
}

} // namespace moe::plan
