// Lays layers out by the rules of published recipes.
#include "planner/plan/cuts.hpp"

#include "planner/model/model.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

namespace moe::plan {
namespace {

struct Parts {
    int layers, mtp;
};

// Stages of so many decoder layers each; what follows the layers is in the last stage, or in stages of their own.
std::vector<Stage> laid_out(const std::vector<int>& runs, const Parts& parts, bool apart) {
    std::vector<Stage> result;
    int layer = 0;
    for (const int run : runs) {
        result.push_back({.first_layer = layer, .layers = run});
        layer += run;
    }
    if (apart && parts.mtp > 0) result.push_back({.first_layer = layer});
    result.back().mtp = parts.mtp;
    if (apart) result.push_back({.first_layer = layer});
    result.front().embedding = true;
    result.back().loss = true;
    return result;
}

// Every part counts as one; empty where they do not divide, or where MTP layers would lie in two stages.
std::optional<std::vector<Stage>> equal_parts(const Parts& parts, int count) {
    const int all = 1 + parts.layers + parts.mtp + 1;
    if (all % count != 0) return std::nullopt;
    const int size = all / count, after_layers = 1 + parts.layers, after_mtp = after_layers + parts.mtp;
    std::vector<Stage> result;
    for (int from = 0; from < all; from += size) {
        const int to = from + size;
        Stage stage;
        stage.embedding = from == 0;
        stage.first_layer = std::clamp(from - 1, 0, parts.layers);
        stage.layers = std::clamp(to - 1, 0, parts.layers) - stage.first_layer;
        stage.mtp = std::clamp(to, after_layers, after_mtp) - std::clamp(from, after_layers, after_mtp);
        if (stage.mtp != 0 && stage.mtp != parts.mtp) return std::nullopt;
        stage.loss = to == all;
        result.push_back(stage);
    }
    return result;
}

} // namespace

std::vector<std::vector<Stage>> recipe_cuts(const model::Model& model, int count) {
    const Parts parts{static_cast<int>(model.layers.size()), static_cast<int>(model.mtp.size())};
    std::vector<std::vector<Stage>> result;
    std::set<std::string> known;
    const auto add = [&](std::vector<Stage> cut) {
        const bool sound = std::all_of(cut.begin(), cut.end(), [&](const Stage& stage) {
            return stage.layers == 0 || may_begin_stage(model, stage.first_layer);
        });
        if (sound && known.insert(layout_to_string(cut)).second) result.push_back(std::move(cut));
    };
    if (count < 2) return result;
    if (std::optional<std::vector<Stage>> cut = equal_parts(parts, count)) add(std::move(*cut));
    for (const bool apart : {false, true}) {
        const int tail = apart ? 1 + (parts.mtp > 0 ? 1 : 0) : 0, runs = count - tail;
        if (runs < 1 || runs > parts.layers) continue;
        const int longer = (parts.layers + runs - 1) / runs, shorter = parts.layers / runs;
        std::vector<int> sizes(static_cast<std::size_t>(runs), longer);
        sizes.back() = parts.layers - longer * (runs - 1);
        if (sizes.back() > 0) add(laid_out(sizes, parts, apart));
        sizes.assign(static_cast<std::size_t>(runs), shorter);
        sizes.front() = parts.layers - shorter * (runs - 1);
        add(laid_out(sizes, parts, apart));
    }
    return result;
}

} // namespace moe::plan
