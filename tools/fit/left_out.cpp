// Refits on residuals that are linear around the fit of all rows, and predicts with what they give.
#include "tools/fit/left_out.hpp"

namespace moe::tools {
namespace {

// The fit of all rows without some of them: residuals are taken as linear around it, which its derivatives tell. Steps
// through predictions themselves stop at their kinks, where a refit began, and make what was left out look better.
Solution refit(LeastSquares rest, const Solution& all) {
    constexpr int enough = 20;
    rest.iterations = enough;
    rest.residuals = [&all](const std::vector<double>& x) {
        std::vector<double> residuals = all.residuals;
        for (std::size_t i = 0; i < residuals.size(); ++i)
            for (std::size_t j = 0; j < x.size(); ++j) residuals[i] += all.jacobian[i][j] * (x[j] - all.x[j]);
        return residuals;
    };
    return solve(rest, all.x, &all.jacobian);
}

} // namespace

std::vector<published::Prediction> left_out(const FitProblem& problem, const Solution& all,
                                            const std::string published::Prediction::*field) {
    const std::vector<std::string> values = problem.values(field);
    std::vector<std::vector<published::Prediction>> folds(values.size());
    in_parallel(values.size(), [&](std::size_t i) {
        folds[i] = problem.predict(refit(problem.squares(field, values[i]), all).x, field, values[i]);
    });
    std::vector<published::Prediction> result = problem.rows();
    for (std::size_t i = 0; i < values.size(); ++i) {
        auto next = folds[i].begin();
        for (published::Prediction& row : result)
            if (row.*field == values[i]) row = *next++;
    }
    return result;
}

} // namespace moe::tools
