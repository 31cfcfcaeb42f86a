// Draws the slots of one rank per pipeline rank over time.
#include "tools/report/pipeline_svg.hpp"

#include "tools/print/table.hpp"
#include "tools/report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <vector>

namespace moe::tools {

namespace {

constexpr int width = 1160, lane_height = 26, lane_gap = 6, left_margin = 84, axis_height = 26;
constexpr std::size_t most_boxes = 6000; // a browser draws that many without delay

struct Box { // one slot
    int lane = 0;
    plan::SlotKind kind{};
    int chunk = 0, micro_batch = 0;
    double start = 0.0, end = 0.0;
};

// The first rank of every pipeline rank, in the pipeline's order.
std::vector<int> lanes_of(const program::Timeline& timeline) {
    std::map<int, int> by_stage;
    for (std::size_t i = 0; i < timeline.ranks.size(); ++i)
        by_stage.try_emplace(timeline.pipeline_rank[i], timeline.ranks[i]);
    std::vector<int> lanes;
    for (const auto& [stage, rank] : by_stage) lanes.push_back(rank);
    return lanes;
}

std::vector<Box> boxes_of(const program::Timeline& timeline, const std::vector<int>& lanes) {
    std::map<std::pair<int, int>, Box> slots; // (lane, slot)
    for (const program::TimelineRow& row : timeline.rows) {
        const auto lane = std::find(lanes.begin(), lanes.end(), row.rank);
        if (lane == lanes.end()) continue;
        const int index = static_cast<int>(lane - lanes.begin());
        const Box fresh{index, row.slot_kind, row.chunk, row.micro_batch, row.start, row.end};
        const auto [at, inserted] = slots.try_emplace({index, row.slot}, fresh);
        if (inserted) continue;
        // The work of a slot begins when its first op does; a receive that waits for its peer is not work yet.
        at->second.start = std::min(at->second.start, row.start);
        at->second.end = std::max(at->second.end, row.end);
    }
    std::vector<Box> boxes;
    for (const auto& [id, box] : slots) boxes.push_back(box);
    return boxes;
}

const char* color(const Box& box) {
    static constexpr const char* forward[] = {"#3b82c4", "#5b9bd5", "#7fb2e0", "#a3c9eb"};
    static constexpr const char* backward[] = {"#2f9e6e", "#52b488", "#78c8a4", "#a0dcc0"};
    static constexpr const char* wgrad[] = {"#8a6fc0", "#a08bce", "#b7a7dc", "#cec3ea"};
    const auto chunk = static_cast<std::size_t>(std::max(0, box.chunk)) % 4;
    switch (box.kind) {
    case plan::SlotKind::forward:
        return forward[chunk];
    case plan::SlotKind::backward:
    case plan::SlotKind::dgrad:
        return backward[chunk];
    case plan::SlotKind::wgrad:
        return wgrad[chunk];
    case plan::SlotKind::begin:
        return "#b0b0b0";
    case plan::SlotKind::finish:
        return "#d08a3e";
    }
    return "#b0b0b0";
}

const char* word(plan::SlotKind kind) {
    switch (kind) {
    case plan::SlotKind::forward:
        return "forward";
    case plan::SlotKind::backward:
        return "backward";
    case plan::SlotKind::dgrad:
        return "gradients of activations";
    case plan::SlotKind::wgrad:
        return "gradients of weights";
    case plan::SlotKind::begin:
        return "begin";
    case plan::SlotKind::finish:
        return "gradients and optimizer";
    }
    return "";
}

void add_box(std::string& out, const Box& box, double from, double scale) {
    const double x = left_margin + (box.start - from) * scale;
    const double w = std::max(0.3, (box.end - box.start) * scale);
    fmt::format_to(std::back_inserter(out),
                   "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}, chunk {}, "
                   "micro-batch {}: {} from {}</title></rect>\n",
                   x, axis_height + box.lane * (lane_height + lane_gap), w, lane_height, color(box), word(box.kind),
                   box.chunk, box.micro_batch, seconds_text(box.end - box.start), seconds_text(box.start));
}

std::string picture(const std::vector<Box>& boxes, std::size_t lanes, double from, double to) {
    const double scale = (width - left_margin) / std::max(to - from, 1e-12);
    const int height = axis_height + static_cast<int>(lanes) * (lane_height + lane_gap);
    std::string out = svg_open(height, "pipeline timeline");
    const Axis axis{from, std::max(to, from + 1e-12), left_margin, width};
    for (const double time : axis.ticks(8))
        fmt::format_to(std::back_inserter(out),
                       "<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\" class=\"grid\"/><text x=\"{0:.1f}\" "
                       "y=\"16\" text-anchor=\"{3}\">{4}</text>\n",
                       axis.at(time), axis_height - 4, height, axis.at(time) > width - 40 ? "end" : "start",
                       tick_seconds(time, to));
    for (std::size_t lane = 0; lane < lanes; ++lane)
        fmt::format_to(std::back_inserter(out), "<text x=\"0\" y=\"{}\">stage {}</text>\n",
                       axis_height + static_cast<int>(lane) * (lane_height + lane_gap) + lane_height / 2 + 4, lane);
    for (const Box& box : boxes)
        if (box.end > from && box.start < to) add_box(out, box, from, scale);
    return out + "</svg>\n";
}

} // namespace

std::string pipeline_svg(const program::Timeline& timeline) {
    const std::vector<int> lanes = lanes_of(timeline);
    std::vector<Box> boxes = boxes_of(timeline, lanes);
    double end = 0.0;
    for (const Box& box : boxes) end = std::max(end, box.end);
    if (boxes.size() <= most_boxes) return picture(boxes, lanes.size(), 0.0, end);
    // Warm-up and cool-down tell most; the steady state between them repeats.
    std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.start < b.start; });
    const double first_end = boxes[most_boxes / 4].start;
    const double last_start = boxes[boxes.size() - most_boxes / 4].start;
    const std::vector<Box> head(boxes.begin(), boxes.begin() + most_boxes / 4);
    const std::vector<Box> tail(boxes.end() - most_boxes / 4, boxes.end());
    return "<p>The first slots:</p>\n" + picture(head, lanes.size(), 0.0, first_end) + "<p>The last slots:</p>\n" +
           picture(tail, lanes.size(), last_start, end);
}

} // namespace moe::tools
