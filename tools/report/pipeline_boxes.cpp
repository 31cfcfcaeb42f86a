// Makes boxes of the rows of a timeline: one for each slot of the first rank of each pipeline stage.
#include "tools/report/pipeline_boxes.hpp"

#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_boxes = 120000; // some 3 MB of text; a page draws those of its window alone

struct Box { // one slot of a pipeline rank
    int stage = 0, half = 0;
    plan::SlotKind kind{};
    int chunk = 0, micro_batch = 0;
    double start = 0.0, end = 0.0;
};

// The slots of each pipeline rank's first rank. Of two merged slots the forward is half 1 and the backward half 2.
std::vector<Box> boxes_of(const program::Timeline& timeline, const plan::Plan& plan) {
    std::map<int, int> lanes; // pipeline rank by rank
    std::map<int, int> first; // rank by pipeline rank
    for (std::size_t i = 0; i < timeline.ranks.size(); ++i)
        if (first.try_emplace(timeline.pipeline_rank[i], timeline.ranks[i]).second)
            lanes[timeline.ranks[i]] = timeline.pipeline_rank[i];
    std::map<std::pair<int, int>, Box> slots; // (pipeline rank, slot)
    for (const program::TimelineRow& row : timeline.rows) {
        const auto lane = lanes.find(row.rank);
        if (lane == lanes.end()) continue;
        const Box fresh{lane->second, 0, row.slot_kind, row.chunk, row.micro_batch, row.start, row.end};
        const auto [at, inserted] = slots.try_emplace({lane->second, row.slot}, fresh);
        if (inserted) continue;
        at->second.start = std::min(at->second.start, row.start);
        at->second.end = std::max(at->second.end, row.end);
    }
    for (const auto& [stage, rank] : first) {
        const program::Program lowered = lower::lower(plan, stage);
        for (std::size_t i = 0; i + 1 < lowered.slots.size(); ++i) {
            if (lowered.slots[i].merge < 0) continue;
            for (const int half : {1, 2})
                if (const auto box = slots.find({stage, static_cast<int>(i) + half - 1}); box != slots.end())
                    box->second.half = half;
        }
    }
    std::vector<Box> boxes;
    for (const auto& [id, box] : slots) boxes.push_back(box);
    return boxes;
}

} // namespace

// Of too many boxes, those in the middle are left out: warm-up and cool-down tell most, the steady state between them
// repeats.
Json pipeline_json(const program::Timeline& timeline, const plan::Plan& plan) {
    std::vector<Box> boxes = boxes_of(timeline, plan);
    std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.start < b.start; });
    std::size_t omitted = 0;
    if (boxes.size() > most_boxes) {
        omitted = boxes.size() - most_boxes;
        const auto from = boxes.begin() + most_boxes / 2;
        boxes.erase(from, from + static_cast<std::ptrdiff_t>(omitted));
    }
    Json kinds = Json::array();
    for (int kind = 0; kind <= static_cast<int>(plan::SlotKind::finish); ++kind)
        kinds.push_back(plan::to_string(static_cast<plan::SlotKind>(kind)));
    Json list = Json::array();
    const auto microseconds = [](double seconds) { return static_cast<std::int64_t>(std::llround(seconds * 1e6)); };
    for (const Box& box : boxes)
        list.push_back({box.stage, static_cast<int>(box.kind), box.chunk, box.micro_batch, microseconds(box.start),
                        microseconds(box.end - box.start), box.half});
    return {{"stages", plan.pp}, {"kinds", kinds}, {"boxes", list}, {"omitted", omitted}};
}

} // namespace moe::tools
