// Collects what the page of a plan shows: its explanation, one pipeline, memory by class over time, and its origin.
#include "tools/report/report_data.hpp"

#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory_timeline.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tools/print/table.hpp"
#include "tools/report/comparison.hpp"
#include "tools/report/origin.hpp"
#include "tools/report/pipeline_boxes.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

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
    Json document = origin_json(explained.at("plan"), command);
    document["tokens_per_second_per_gpu"] = e.simulation.estimate.tokens_per_second_per_gpu;
    document["interval"] = interval_of(e.interval);
    document["interval_text"] = interval_text(e.interval);
    document["choices"] = choices_json(e.plan);
    document["breakdown"] = Json::array();
    for (const auto& [name, seconds] : parts_of(e.simulation.estimate.breakdown))
        if (seconds != 0.0) document["breakdown"].push_back({{"part", name}, {"seconds", seconds}});
    document["explain"] = explained;
    document["pipeline"] = pipeline_json(e.simulation.timeline, e.simulation.planned);
    document["memory_over_time"] = memory_json(e);
    document["kinds"] = kinds_json(e.simulation.timeline);
    document["skew"] = skew_of(e);
    return stamped(schema::report, document);
}

} // namespace moe::tools
