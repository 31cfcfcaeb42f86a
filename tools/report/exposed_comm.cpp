// Exposed communication by sweeping over the starts and ends of a rank's ops.
#include "tools/report/exposed_comm.hpp"

#include <algorithm>
#include <map>

namespace moe::tools {

namespace {

struct Edge {
    double time = 0.0;
    bool communicates = false;
    int change = 0; // +1 begins, -1 ends
};

double exposed(std::vector<Edge> edges) {
    std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.time < b.time; });
    double seconds = 0.0, since = 0.0;
    int communicating = 0, working = 0;
    for (const Edge& edge : edges) {
        if (communicating > 0 && working == 0) seconds += edge.time - since;
        since = edge.time;
        (edge.communicates ? communicating : working) += edge.change;
    }
    return seconds;
}

} // namespace

double exposed_communication(const program::Timeline& timeline) {
    std::map<int, std::vector<Edge>> ranks;
    for (const program::TimelineRow& row : timeline.rows) {
        const bool communicates = program::is_communication(row.kind);
        ranks[row.rank].push_back({row.start, communicates, 1});
        ranks[row.rank].push_back({row.end, communicates, -1});
    }
    double sum = 0.0;
    for (auto& [rank, edges] : ranks) sum += exposed(std::move(edges));
    return ranks.empty() ? 0.0 : sum / static_cast<double>(ranks.size());
}

} // namespace moe::tools
