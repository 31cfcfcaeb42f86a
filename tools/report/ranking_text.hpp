// A ranking as text: the table of plans, and the lines below it.
#pragma once

#include "tools/print/table.hpp"
#include "tools/report/ranking.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// One row for each plan. FSDP, dispatcher, CUDA graph, EP overlap, capacity, offload and the number of GPUs have
// columns where plans differ in them; hours, money and goodput where they are asked for. A number is followed by "="
// where the plan cannot be told apart from the first, and by "*" where it trains differently.
Table ranking_table(const search::SearchResult& result, const Ranking& ranking);

// What the marks mean, which plan is the simplest of equal ones, and what trains differently; none where no plan is
// marked.
std::vector<std::string> ranking_lines(const search::SearchResult& result, const Ranking& ranking);

// The published runs nearest to the first plan; no rows where there are none.
Table nearest_table(const Ranking& ranking);

// The lengths of documents and what they make of steps, in one line.
std::string document_steps_text(const replay::DocumentSteps& documents);

} // namespace moe::tools
