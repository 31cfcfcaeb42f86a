// Reads what execute keeps of a run, run.json and routing.csv, for the page of that run.
#pragma once

#include "tools/report/documents.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Steps, evaluations and totals of a run.json; figures that are null there are no numbers. Throws Error (bad_input)
// that names file and field.
RunRecord read_run(const std::string& path);

// Tokens by MoE layer and expert; empty where there is no such file. Throws Error (bad_input).
std::vector<std::vector<double>> read_routed(const std::string& path);

} // namespace moe::tools
