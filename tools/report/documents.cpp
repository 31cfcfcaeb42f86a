// Builds the JSON documents of the verbs.
#include "tools/report/documents.hpp"

#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "planner/plan/plan.hpp"
#include "tools/print/table.hpp"
#include "tools/report/correction.hpp"
#include "tools/report/money_report.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

Json breakdown(const search::Breakdown& b) {
    return {{"compute", b.compute},     {"recompute", b.recompute}, {"tensor", b.tensor},        {"context", b.context},
            {"expert", b.expert},       {"pipeline", b.pipeline},   {"bubble", b.bubble},        {"data", b.data},
            {"optimizer", b.optimizer}, {"host", b.host},           {"neighbours", b.neighbours}};
}

void add_estimate(Json& document, const search::Estimate& estimate) {
    document["tflops_per_gpu"] = estimate.tflops_per_gpu;
    document["tokens_per_second_per_gpu"] = estimate.tokens_per_second_per_gpu;
    document["step_seconds"] = estimate.step_seconds;
    document["memory_gib"] = gib(estimate.memory_bytes);
    document["fits"] = estimate.fits;
    document["breakdown"] = breakdown(estimate.breakdown);
}

Json quantiles_json(const routing::Quantiles& q, double scale = 1.0) {
    return {{"mean", q.mean * scale}, {"p50", q.p50 * scale}, {"p99", q.p99 * scale}};
}

Json replication_json(const std::optional<pricing::Replication>& replication) {
    if (!replication) return nullptr;
    const pricing::Replication& r = *replication;
    return {{"spare_experts", r.slots},
            {"load", quantiles_json(r.loads.time)},
            {"copies", r.copies},
            {"copies_of_one_rank", r.most_sent},
            {"plan_seconds", r.plan_seconds},
            {"weight_seconds", r.weight_seconds},
            {"gradient_seconds", r.gradient_seconds},
            {"exposed_gradient_seconds", r.exposed_seconds},
            {"added_seconds", r.added_seconds},
            {"slots_gib", gib(r.slot_bytes)},
            {"step_seconds", r.estimate.step_seconds},
            {"tflops_per_gpu", r.estimate.tflops_per_gpu},
            {"memory_gib", gib(r.estimate.memory_bytes)},
            {"fits", r.estimate.fits},
            {"share_of_balanced", r.share_of_balanced}};
}

Json document_steps_json(const std::optional<replay::DocumentSteps>& documents) {
    if (!documents) return nullptr;
    return {{"step_seconds", quantiles_json(documents->step_seconds)},
            {"mean_length", documents->mean_length},
            {"pairs", documents->pairs},
            {"steps", documents->steps}};
}

Json skew_json(const pricing::Skew& skew) {
    return {{"load", quantiles_json(skew.loads.time)},
            {"step_seconds", quantiles_json(skew.step_seconds)},
            {"tflops_per_gpu", quantiles_json(skew.tflops_per_gpu)},
            {"memory_gib", quantiles_json(skew.memory_bytes, gib(1.0))},
            {"overflow_probability", skew.loads.overflow},
            {"replication", replication_json(skew.replication)}};
}

Json interval_json(const published::IntervalResult& result) {
    if (!result.interval) return nullptr;
    const published::Interval& i = *result.interval;
    return {{"low", i.low},
            {"high", i.high},
            {"coverage", published::interval_coverage},
            {"rows", i.rows},
            {"new_family", i.new_family},
            {"new_system", i.new_system},
            {"new_stack", i.new_stack},
            {"new_release", i.new_release}};
}

const published::Correction* pointer(const std::optional<published::Correction>& correction) {
    return correction ? &*correction : nullptr;
}

// [low, high] in TFLOPS/GPU; null where nothing is known.
void add_note(Json& entry, const PlanNote& note) {
    const auto& interval = note.interval.interval;
    entry["interval"] = interval ? Json{interval->low, interval->high} : Json(nullptr);
    entry["neighbours"] = correction_json(pointer(note.correction));
    entry["equal_to_first"] = note.equal_to_first;
    entry["first_is_faster"] = note.certainty ? Json(*note.certainty) : Json(nullptr);
    entry["trains_differently"] = note.trains_differently;
    entry["documents"] = document_steps_json(note.documents);
    entry["nearest_published"] = Json::array();
    for (const published::NearRun& run : note.nearest)
        entry["nearest_published"].push_back({{"run_id", run.run_id},
                                              {"measured", run.measured},
                                              {"predicted", run.predicted},
                                              {"differs_in", run.differs_in}});
}

Json summary_json(const published::ValidationSummary& s) {
    return {{"rows", s.rows},
            {"predicted", s.predicted},
            {"skipped", s.skipped},
            {"mape", s.mape},
            {"bias", s.bias},
            {"within_10_percent", s.within_10_percent},
            {"kendall_tau", s.kendall_tau},
            {"pairs", s.pairs},
            {"intervals", s.intervals},
            {"coverage", s.coverage},
            {"width", s.width}};
}

Json left_out_json(const std::vector<published::LeftOutCoverage>& coverage) {
    const auto figures = [](const published::Coverage& c) { return Json{{"coverage", c.inside}, {"width", c.width}}; };
    Json ways = Json::object();
    for (const published::LeftOutCoverage& way : coverage) {
        Json& systems = ways[way.left_out] = {{"all", figures(way.all)}, {"systems", Json::object()}};
        for (const auto& [name, of_system] : way.systems) systems["systems"][name] = figures(of_system);
    }
    return ways;
}

// Published figures stand in skipped rows too, where there are any; predictions and errors only where there is one.
Json prediction_json(const published::Prediction& p) {
    const bool predicted = p.skipped.empty();
    const auto or_null = [](bool known, double value) { return known ? Json(value) : Json(nullptr); };
    const auto& interval = p.interval;
    return {{"run_id", p.run_id},
            {"published_tflops_per_gpu", or_null(p.published > 0.0, p.published)},
            {"predicted_tflops_per_gpu", or_null(predicted, p.predicted)},
            {"error", or_null(predicted, p.error)},
            {"interval", interval ? Json{interval->low, interval->high} : Json(nullptr)},
            {"neighbours", correction_json(pointer(p.correction))},
            {"skipped", predicted ? Json(nullptr) : Json(p.skipped)},
            {"warnings", p.warnings}};
}

} // namespace

std::string search_document(const search::SearchResult& result, int gpus, const Ranking& ranking) {
    Json document = {{"gpus", gpus}, {"evaluated", result.evaluated}};
    document["pruned"] = Json::object();
    for (const auto& [reason, count] : result.pruned) document["pruned"][reason] = count;
    document["seconds"] = result.seconds;
    if (ranking.money) document.update(money_json(*ranking.money));
    document["replication"] = replication_json(ranking.replication);
    document["plans"] = Json::array();
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        const auto& [plan, estimate] = result.plans[i];
        Json entry = {{"plan", parse_json<Json>(plan::plan_to_json(plan), "plan")}};
        add_estimate(entry, estimate);
        add_note(entry, ranking.plans[i]);
        if (ranking.money) entry.update(outlook_json(*ranking.plans[i].outlook, ranking.money->terms));
        document["plans"].push_back(std::move(entry));
    }
    return stamped(schema::search, document);
}

namespace {

// Sizes in GiB. The classes and "outside" (context and communicators) add up to memory_gib.
Json memory_of(const replay::Simulation& simulation) {
    const auto fullest = std::max_element(simulation.memory_bytes.begin(), simulation.memory_bytes.end());
    const auto rank = static_cast<std::size_t>(fullest - simulation.memory_bytes.begin());
    const memory::MemoryBreakdown& held = simulation.held[rank];
    const auto at = [](memory::MemoryClass c) { return static_cast<std::size_t>(c); };
    Json memory = Json::object();
    memory["pipeline_rank"] = rank;
    for (const memory::MemoryClass c :
         {memory::MemoryClass::weights, memory::MemoryClass::gradients, memory::MemoryClass::optimizer})
        memory[memory::to_string(c)] = {{"gib", gib(static_cast<double>(held.classes[at(c)]))},
                                        {"experts_gib", gib(static_cast<double>(held.expert[at(c)]))}};
    Json modules = Json::object();
    for (const auto& [module, bytes] : held.saved)
        modules[program::to_string(module)] = gib(static_cast<double>(bytes));
    memory["saved"] = {{"gib", gib(static_cast<double>(held.classes[at(memory::MemoryClass::saved)]))},
                       {"kept", held.kept},
                       {"by_module_gib", std::move(modules)}};
    memory["workspace"] = {{"gib", gib(static_cast<double>(held.classes[at(memory::MemoryClass::transient)]))}};
    memory["inputs"] = {{"gib", gib(static_cast<double>(held.classes[at(memory::MemoryClass::inputs)]))}};
    memory["outside"] = {{"gib", gib(*fullest - static_cast<double>(simulation.memory[rank].arena_bytes))}};
    return memory;
}

} // namespace

std::string replay_document(const replay::Simulation& simulation, const pricing::Skew& skew,
                            const std::optional<replay::DocumentSteps>& documents,
                            const published::IntervalResult& interval, const published::Correction* correction,
                            const std::string& trace, const std::string& report) {
    Json document = Json::object();
    add_estimate(document, simulation.estimate);
    document["memory"] = memory_of(simulation);
    document["skew"] = skew_json(skew);
    document["documents"] = document_steps_json(documents);
    document["interval"] = interval_json(interval);
    document["neighbours"] = correction_json(correction);
    if (!interval.interval) document["interval_reason"] = interval.reason;
    document["ops"] = simulation.ops;
    document["ranks"] = simulation.ranks;
    if (!trace.empty()) document["trace"] = trace;
    if (!report.empty()) document["report"] = report;
    return stamped(schema::replay, document);
}

std::string comparison_document(const Comparison& comparison) {
    Json document = {{"predicted_tflops_per_gpu", comparison.predicted_tflops},
                     {"measured_tflops_per_gpu", comparison.measured_tflops},
                     {"error", comparison.error()},
                     {"predicted_step_seconds", comparison.predicted_seconds},
                     {"measured_step_seconds", comparison.measured_seconds},
                     {"predicted_memory_gib", comparison.predicted_memory_gib},
                     {"measured_memory_gib", comparison.measured_memory_gib},
                     {"predicted_exposed_communication_seconds", comparison.predicted_exposed},
                     {"measured_exposed_communication_seconds", comparison.measured_exposed},
                     {"matched_ops", comparison.matched}};
    document["by_kind"] = Json::array();
    for (const ComparedKind& kind : comparison.kinds)
        document["by_kind"].push_back({{"kind", program::to_string(kind.kind)},
                                       {"count", kind.count},
                                       {"predicted_seconds", kind.predicted},
                                       {"measured_seconds", kind.measured}});
    document["widest"] = Json::array();
    for (const ComparedOp& op : comparison.widest)
        document["widest"].push_back({{"kind", program::to_string(op.measured.kind)},
                                      {"rank", op.measured.rank},
                                      {"slot", op.measured.slot},
                                      {"op", op.measured.op},
                                      {"layer", op.measured.layer},
                                      {"phase", program::to_string(op.measured.phase)},
                                      {"predicted_seconds", op.predicted.busy},
                                      {"measured_seconds", op.measured.busy}});
    return stamped(schema::compare, document);
}

std::string validation_document(const std::vector<published::Prediction>& predictions,
                                const std::vector<published::Improvement>* improvements,
                                const std::vector<published::LeftOutCoverage>& coverage) {
    Json document = {{"rows", Json::array()}};
    for (const published::Prediction& p : predictions) {
        Json row = prediction_json(p);
        if (p.skipped.empty()) {
            row["stack"] = p.stack;
            row["mbs"] = p.plan.mbs;
            row["recompute"] = plan::recompute::to_string(p.plan.recompute);
            row["step_seconds"] = p.estimate.step_seconds;
            row["memory_gib"] = gib(p.estimate.memory_bytes);
            row["breakdown"] = breakdown(p.estimate.breakdown);
        }
        document["rows"].push_back(std::move(row));
    }
    document["summary"] = summary_json(published::summarize(predictions));
    for (const auto& [name, field] : published::validation_groups) {
        Json& groups = document["groups"][name] = Json::object();
        for (const auto& [value, summary] : published::summarize_by(predictions, field))
            groups[value] = summary_json(summary);
    }
    if (!coverage.empty()) document["left_out"] = left_out_json(coverage);
    if (improvements == nullptr) return stamped(schema::validate, document);
    Json& list = document["improvements"] = Json::array();
    for (const published::Improvement& i : *improvements) {
        Json changes = Json::array();
        for (const plan::FieldChange& c : i.changes)
            changes.push_back({{"field", c.field}, {"from", c.from}, {"to", c.to}});
        list.push_back({{"run_id", i.run_id},
                        {"published_plan_tflops_per_gpu", i.published_tflops},
                        {"tflops_per_gpu", i.estimate.tflops_per_gpu},
                        {"candidates", i.candidates},
                        {"seconds", i.seconds},
                        {"changes", changes},
                        {"plan", parse_json<Json>(plan::plan_to_json(i.best), "plan")}});
    }
    return stamped(schema::validate, document);
}

std::string export_document(std::int64_t step, std::size_t parameters, const std::string& out) {
    return stamped(schema::exported, {{"step", step}, {"parameters", parameters}, {"out", out}});
}

std::string launch_document(int nodes, int per_node, const std::string& out, const std::string& text) {
    return stamped(schema::launch, {{"nodes", nodes}, {"processes_per_node", per_node}, {"out", out}, {"text", text}});
}

std::string import_document(const Import& import, const std::string& out) {
    Json unknown = Json::array(), findings = Json::array();
    for (const NotUnderstood& one : import.unknown)
        unknown.push_back(
            {{"setting", one.setting}, {"value", one.value}, {"file", one.file}, {"line", one.line}, {"why", one.why}});
    for (const Severity severity : {Severity::error, Severity::warning, Severity::hint})
        for (const Finding& one : import.findings)
            if (one.severity == severity)
                findings.push_back({{"severity", to_string(severity)}, {"field", one.field}, {"message", one.message}});
    return stamped(schema::imported, Json{{"engine", import.format},
                                          {"release", import.release},
                                          {"plan", parse_json<Json>(plan::plan_to_json(import.plan), "plan")},
                                          {"settings", import.settings},
                                          {"harmless", import.harmless},
                                          {"unknown", unknown},
                                          {"findings", findings},
                                          {"out", out}});
}

std::string launch_engine_document(const EngineLaunch& launch, const Nodes& nodes, const std::string& out) {
    Json document{{"engine", launch.engine}, {"release", launch.release}};
    document.update(launch.said);
    document["env"] = launch.environment;
    document["nodes"] = nodes.count;
    document["gpus_per_node"] = nodes.gpus;
    document["out"] = out;
    if (!launch.text.empty()) document["text"] = launch.text;
    return stamped(schema::launch_engine, document);
}

std::string tokenize_document(std::int64_t documents, std::int64_t tokens, const std::string& prefix) {
    return stamped(schema::tokenize, Json{{"documents", documents}, {"tokens", tokens}, {"prefix", prefix}});
}

} // namespace moe::tools
