// Collects what the page of a plan shows: boxes of slots by pipeline rank, memory by class over time, and its origin.
#include "tools/report/report_data.hpp"

#include "engine/base/hmac.hpp"
#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory_timeline.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tools/print/table.hpp"
#include "tools/report/comparison.hpp"
#include "tools/report/stamp.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
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
std::vector<Box> boxes_of(const Explanation& e) {
    const program::Timeline& timeline = e.simulation.timeline;
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
        const program::Program lowered = lower::lower(e.simulation.planned, stage);
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

// Boxes as arrays [pipeline rank, kind, chunk, micro-batch, start, length, half], times in whole microseconds. Of too
// many, those in the middle are left out: warm-up and cool-down tell most, the steady state between them repeats.
Json pipeline_json(const Explanation& e) {
    std::vector<Box> boxes = boxes_of(e);
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
    return {{"stages", e.plan.pp}, {"kinds", kinds}, {"boxes", list}, {"omitted", omitted}};
}

// The rows of one rank, each from when it works: a receive that waits for its peer holds nothing yet.
program::Timeline working(const program::Timeline& timeline, int rank) {
    program::Timeline own;
    own.step_seconds = timeline.step_seconds;
    for (const program::TimelineRow& row : timeline.rows) {
        if (row.rank != rank) continue;
        own.rows.push_back(row);
        if (row.busy > 0.0) own.rows.back().start = std::max(row.start, row.end - row.busy);
    }
    return own;
}

// The most that is in use in each of equal intervals, by class, on the fullest pipeline rank.
Json memory_json(const Explanation& e) {
    constexpr int samples = 600;
    const replay::Walls& w = e.walls;
    const program::Timeline& timeline = e.simulation.timeline;
    const auto first = std::find(timeline.pipeline_rank.begin(), timeline.pipeline_rank.end(), w.fullest);
    const int rank = timeline.ranks[static_cast<std::size_t>(first - timeline.pipeline_rank.begin())];
    const memory::MemoryPlan& planned = e.simulation.memory[static_cast<std::size_t>(w.fullest)];
    const std::vector<memory::MemoryUse> uses = memory::memory_over_time(
        lower::lower(e.simulation.planned, w.fullest), planned, working(timeline, rank), rank, samples);
    const auto gib_of = [](double bytes) { return rounded_to(gib(bytes), 6); };
    Json seconds = Json::array(), classes = Json::array();
    for (const memory::MemoryUse& use : uses) seconds.push_back(rounded_to(use.from, 7));
    const double outside = w.memory_bytes - static_cast<double>(planned.arena_bytes);
    classes.push_back(
        {{"class", "context and communicators"}, {"gib", std::vector<double>(uses.size(), gib_of(outside))}});
    constexpr std::array order{memory::MemoryClass::weights,   memory::MemoryClass::optimizer,
                               memory::MemoryClass::gradients, memory::MemoryClass::inputs,
                               memory::MemoryClass::saved,     memory::MemoryClass::transient};
    for (const memory::MemoryClass c : order) {
        std::vector<double> values;
        for (const memory::MemoryUse& use : uses) values.push_back(gib_of(use.bytes[static_cast<std::size_t>(c)]));
        const char* name = c == memory::MemoryClass::saved       ? "saved activations"
                           : c == memory::MemoryClass::transient ? "workspace"
                                                                 : memory::to_string(c);
        if (std::any_of(values.begin(), values.end(), [](double value) { return value > 0.0; }))
            classes.push_back({{"class", name}, {"gib", values}});
    }
    return {{"stage", w.fullest}, {"seconds", seconds}, {"classes", classes}};
}

Json kinds_json(const program::Timeline& timeline) {
    Json list = Json::array();
    for (const KindTotal& total : totals_by_kind(timeline))
        list.push_back({{"kind", program::to_string(total.kind)}, {"seconds", total.seconds}});
    return list;
}

std::string now_text() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    std::array<char, 32> text{};
    std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &parts));
    return text.data();
}

std::string hash_of(const std::string& text) {
    std::string out;
    for (const auto byte : engine::sha256(text)) out += fmt::format("{:02x}", static_cast<unsigned>(byte));
    return out;
}

// The content of the model and of the machine as they stand in the plan; equal hashes mean equal profiles.
Json hashes_json(const Json& plan) {
    return {{"model", hash_of(plan.at("model").dump())}, {"hardware", hash_of(plan.at("hardware").dump())}};
}

Json interval_of(const published::IntervalResult& result) {
    if (!result.interval) return nullptr;
    return {{"low", result.interval->low}, {"high", result.interval->high}, {"coverage", published::interval_coverage}};
}

Json skew_of(const Explanation& e) {
    if (!routing::skewed(e.plan)) return nullptr;
    Json rows = Json::array();
    for (const auto& [name, value] : {std::pair{"mean", &routing::Quantiles::mean},
                                      {"p50", &routing::Quantiles::p50},
                                      {"p99", &routing::Quantiles::p99}})
        rows.push_back({{"over_steps", name},
                        {"load", e.skew.loads.time.*value},
                        {"step_seconds", e.skew.step_seconds.*value},
                        {"tflops_per_gpu", e.skew.tflops_per_gpu.*value},
                        {"memory_gib", gib(e.skew.memory_bytes.*value)}});
    Json lines = Json::array();
    if (e.skew.replication)
        for (const std::string& line : replication_lines(*e.skew.replication)) lines.push_back(line);
    return {{"routing", e.plan.routing}, {"overflow", e.skew.loads.overflow}, {"rows", rows}, {"copies", lines}};
}

} // namespace

std::string report_document(const Explanation& e, const std::string& command) {
    const Json explained = parse_json<Json>(explanation_document(e, nullptr), "explanation");
    Json document = {{"version", MOE_PLAN_VERSION},
                     {"date", now_text()},
                     {"command", command},
                     {"sha256", hashes_json(explained.at("plan"))},
                     {"tokens_per_second_per_gpu", e.simulation.estimate.tokens_per_second_per_gpu},
                     {"interval", interval_of(e.interval)},
                     {"interval_text", interval_text(e.interval)}};
    document["choices"] = Json::array(); // fields that are not at their default
    for (const std::string& field : plan::field_names())
        if (const std::string text = plan::field_text(e.plan, field); text != plan::field_text(plan::Plan{}, field))
            document["choices"].push_back({{"field", field}, {"value", text}});
    document["breakdown"] = Json::array();
    for (const auto& [name, seconds] : parts_of(e.simulation.estimate.breakdown))
        if (seconds != 0.0) document["breakdown"].push_back({{"part", name}, {"seconds", seconds}});
    document["explain"] = explained;
    document["pipeline"] = pipeline_json(e);
    document["memory_over_time"] = memory_json(e);
    document["kinds"] = kinds_json(e.simulation.timeline);
    document["skew"] = skew_of(e);
    return stamped(schema::report, document);
}

} // namespace moe::tools
