// Exposed communication by sweeping over the starts and ends of what runs on a device.
#include "tools/report/exposed_comm.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace moe::tools {

namespace {

struct Edge {
    double time = 0.0;
    SpanSort sort = SpanSort::work;
    int change = 0; // +1 begins, -1 ends
};

} // namespace

SpanTotals totals_of(const std::vector<BusySpan>& spans) {
    std::vector<Edge> edges;
    edges.reserve(2 * spans.size());
    for (const BusySpan& span : spans) {
        edges.push_back({span.start, span.sort, 1});
        edges.push_back({span.end, span.sort, -1});
    }
    std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.time < b.time; });
    SpanTotals totals;
    double since = 0.0;
    std::array<long, 3> running{};
    for (const Edge& edge : edges) {
        const double passed = edge.time - since;
        const auto [work, communication, copy] = running;
        if (communication > 0 && work == 0) totals.exposed += passed;
        if (work + communication + copy > 0) totals.busy += passed;
        since = edge.time;
        running[static_cast<std::size_t>(edge.sort)] += edge.change;
    }
    return totals;
}

double exposed_communication(const program::Timeline& timeline) {
    std::map<int, std::vector<BusySpan>> ranks;
    for (const program::TimelineRow& row : timeline.rows)
        ranks[row.rank].push_back(
            {row.start, row.end, program::is_communication(row.kind) ? SpanSort::communication : SpanSort::work});
    double sum = 0.0;
    for (const auto& [rank, spans] : ranks) sum += totals_of(spans).exposed;
    return ranks.empty() ? 0.0 : sum / static_cast<double>(ranks.size());
}

} // namespace moe::tools
