// The results of the fit: residuals of every row as data, and their tables, profiles/runs/ACCURACY.md.
#pragma once

#include "planner/machine/coefficients.hpp"
#include "simulator/published/validate.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Rows predicted with all rows fitted, and each with its own model family, its system, or the rows of its system and
// stack left out of the fit.
struct CrossValidation {
    std::vector<published::Prediction> fitted, left_family, left_system, left_release;
};

// All of them from predictions with the stored coefficients and residuals.json, rounded as that file is: what the
// tables are made of. Throws Error (bad_input) for a row without a residual.
CrossValidation stored_rows(const std::vector<published::Prediction>& predictions, const std::string& residuals,
                            const std::string& place);
// Keeps for rows that residuals.json knows what was left out as it stands there.
void keep_stored(CrossValidation& rows, const std::string& residuals);
// JSON for profiles/runs/residuals.json: log(predicted / published) of every row, four ways.
std::string residuals_json(const CrossValidation& rows);
// The whole file profiles/runs/ACCURACY.md: errors by class four ways, by system and family, the coefficients, and
// every row off by more than 15 %.
std::string accuracy_document(const CrossValidation& rows, const machine::Coefficients& coefficients);

} // namespace moe::tools
