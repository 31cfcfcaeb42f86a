// What runs take and cost, as text and as JSON: hours, dollars and goodput of plans, and what they assume.
#pragma once

#include "simulator/published/interval.hpp"
#include "tools/print/table.hpp"
#include "tools/report/ranking.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace moe::tools {

// Columns of a ranking: goodput with failures, hours, and dollars with a price, else GPU-hours.
std::vector<std::string> money_headings(const goodput::Terms& terms);
std::vector<std::string> money_cells(const goodput::Outlook& outlook, const goodput::Terms& terms);

// One row for each number of GPUs that was searched, the cheapest plan of each; why others have none stands below.
Table counts_table(const Money& money);
std::vector<std::string> counts_lines(const Money& money);

// What is assumed, one line each: tokens, price, failures, checkpoints, restart and deadline; of the first plan where
// it depends on the plan.
std::vector<std::string> assumption_lines(const Money& money, const PlanNote& first, const plan::Plan& plan,
                                          double tflops_per_gpu);

// "assumptions" and "counts" of the document.
nlohmann::ordered_json money_json(const Money& money);
// The fields of one plan.
nlohmann::ordered_json outlook_json(const goodput::Outlook& outlook, const goodput::Terms& terms);

} // namespace moe::tools
