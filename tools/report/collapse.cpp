// Counts steps in a row in which a layer's hottest expert has nearly all tokens.
#include "tools/report/collapse.hpp"

#include <fmt/format.h>

namespace moe::tools {
namespace {

constexpr double nearly_all = 0.9;
constexpr int steps_in_a_row = 10;

std::string advice(double aux_loss) {
    if (aux_loss > 0.0) return fmt::format("a stronger balancing loss than --aux-loss {:.3g} spreads tokens", aux_loss);
    return "a balancing loss (--aux-loss 0.01) spreads tokens";
}

} // namespace

double CollapseWatch::most(const train::RouterStep& router) const {
    for (const model::LayerKind& kind : model_.kinds)
        if (kind.moe && kind.moe->experts == static_cast<int>(router.tokens.size()))
            return static_cast<double>(kind.moe->experts) / kind.moe->top_k;
    return 0.0;
}

std::vector<std::string> CollapseWatch::add(const train::StepResult& step) {
    std::vector<std::string> lines;
    for (const train::RouterStep& router : step.routers) {
        const double load = router.max_over_mean(), limit = most(router);
        int& steps = hot_[router.layer];
        if (steps >= steps_in_a_row) continue; // told
        // With all experts chosen every load is even.
        steps = limit > 1.0 && load >= nearly_all * limit ? steps + 1 : 0;
        if (steps == steps_in_a_row)
            lines.push_back(
                fmt::format("layer {}: its router has collapsed: one expert has {:.2f} times the mean load, of "
                            "{:.2f} at most, and nearly so for {} steps; {}",
                            router.layer, load, limit, steps_in_a_row, advice(aux_loss_)));
    }
    return lines;
}

} // namespace moe::tools
