// The page of a run: what was learned, how the experts were loaded, and what was predicted beside what was measured.
#pragma once

#include "tools/report/comparison.hpp"
#include "tools/report/documents.hpp"

#include <string>
#include <vector>

namespace moe::tools {

struct RunReport {
    const program::Timeline& predicted;
    const program::Timeline* measured = nullptr; // null: no step was recorded
    const RunRecord* run = nullptr;              // null: the timelines are all that is known
    std::vector<std::vector<double>> routed;     // tokens by MoE layer and expert; empty: not counted
    std::string command;                         // as typed, empty where it is not known
};

// docs/schemas/run-report.json describes the document. Of more than 2,000 steps every N-th is in it, and the last one.
// Throws Error (bad_input) as compare() does, and for timelines that are not of their plan.
std::string run_report_document(const RunReport& report);

// Writes the page, or where the path ends in .json the document.
void write_run_report(const RunReport& report, const std::string& path);

} // namespace moe::tools
