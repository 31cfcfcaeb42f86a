// The JSON document of explain.
#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "tools/print/table.hpp"
#include "tools/report/correction.hpp"
#include "tools/report/explanation.hpp"
#include "tools/report/stamp.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

Json changes_json(const std::vector<plan::FieldChange>& changes) {
    Json list = Json::array();
    for (const plan::FieldChange& c : changes) list.push_back({{"field", c.field}, {"from", c.from}, {"to", c.to}});
    return list;
}

Json figures(const search::Estimate& e) {
    return {{"tflops_per_gpu", e.tflops_per_gpu},
            {"step_seconds", e.step_seconds},
            {"memory_gib", gib(e.memory_bytes)},
            {"fits", e.fits}};
}

Json delta_json(const search::WhatIf& w, const std::optional<double>& certainty, const search::Estimate& base) {
    Json delta = {{"field", w.change.field}, {"from", w.change.from}, {"to", w.change.to}};
    delta["along"] = changes_json(w.along);
    delta.update(figures(w.estimate));
    delta["gain"] = w.gain;
    delta["certainty"] = certainty ? Json(*certainty) : Json(nullptr);
    delta["step_seconds_delta"] = w.estimate.step_seconds - base.step_seconds;
    delta["memory_gib_delta"] = gib(w.estimate.memory_bytes - base.memory_bytes);
    return delta;
}

Json walls_json(const Explanation& e) {
    const replay::Walls& w = e.walls;
    Json memory = {{"stage", w.fullest}, {"memory_gib", gib(w.memory_bytes)}, {"limit_gib", gib(w.memory_limit)}};
    memory["classes"] = Json::array();
    for (const auto& [name, bytes] : w.memory) memory["classes"].push_back({{"class", name}, {"gib", gib(bytes)}});
    Json communication = {{"stage", w.stage},
                          {"axes", Json::array()},
                          {"sparing_products", w.reserving},
                          {"spared_multiprocessors", w.reserved_sms}};
    for (const replay::CommunicationWall& c : w.communication)
        communication["axes"].push_back({{"axis", c.axis},
                                         {"busy_seconds", c.busy},
                                         {"exposed_seconds", c.exposed},
                                         {"bytes", c.bytes},
                                         {"ops", c.ops}});
    Json compute = {{"stage", w.stage},
                    {"seconds_at_peak", w.model_seconds},
                    {"mfu", w.model_seconds / e.simulation.estimate.step_seconds},
                    {"host_issue_seconds", w.issue_seconds},
                    {"host_exposed_seconds", e.simulation.estimate.breakdown.host},
                    {"launches", w.launches},
                    {"unaligned_products", w.unaligned},
                    {"unaligned_seconds", w.unaligned_seconds},
                    {"classes", Json::array()}};
    for (const replay::ComputeWall& c : w.compute)
        compute["classes"].push_back({{"class", c.name},
                                      {"busy_seconds", c.busy},
                                      {"seconds_at_peak", c.ideal},
                                      {"recompute_seconds", c.repeated},
                                      {"ops", c.ops}});
    Json walls = {{"memory", memory}, {"communication", communication}, {"compute", compute}};
    walls["losses"] = Json::array();
    for (const auto& [cause, seconds] : losses(e)) walls["losses"].push_back({{"cause", cause}, {"seconds", seconds}});
    return walls;
}

Json differences_json(const std::vector<Difference>& list, const char* name, const char* unit, double scale) {
    Json result = Json::array();
    for (const Difference& d : list)
        result.push_back({{name, d.name},
                          {fmt::format("here_{}", unit), d.here * scale},
                          {fmt::format("there_{}", unit), d.there * scale}});
    return result;
}

} // namespace

std::string infeasibility_document(const search::Infeasibility& why, const std::string& line) {
    Json document = {{"feasible", false}, {"reason", line}};
    document["constraints"] = Json::array();
    for (const search::Obstacle& o : why.obstacles)
        document["constraints"].push_back(
            {{"constraint", o.constraint}, {"candidates", o.candidates}, {"example", o.example}});
    document["closest"] = Json::array();
    for (const search::TightConfig& m : why.closest)
        document["closest"].push_back({{"memory_gib", gib(m.memory_bytes)},
                                       {"limit_gib", gib(m.plan.hardware->memory_bytes)},
                                       {"plan", parse_json<Json>(plan::plan_to_json(m.plan), "plan")}});
    document["remedies"] = Json::array();
    for (const search::Remedy& r : why.remedies)
        document["remedies"].push_back({{"change", r.what},
                                        {"from", r.from},
                                        {"to", r.to},
                                        {"memory_gib", gib(r.memory_bytes)},
                                        {"plan", parse_json<Json>(plan::plan_to_json(r.plan), "plan")}});
    return stamped(schema::explain, document);
}

std::string explanation_document(const Explanation& e, const Versus* versus) {
    Json document = {{"feasible", true}};
    document.update(figures(e.simulation.estimate));
    document["plan"] = parse_json<Json>(plan::plan_to_json(e.plan), "plan");
    document["neighbours"] = correction_json(e.correction ? &*e.correction : nullptr);
    document["walls"] = walls_json(e);
    document["base"] = figures(e.base);
    document["deltas"] = Json::array();
    document["impossible"] = Json::array();
    for (std::size_t i = 0; i < e.deltas.size(); ++i) {
        const search::WhatIf& w = e.deltas[i];
        if (w.impossible.empty())
            document["deltas"].push_back(delta_json(w, e.certainties[i], e.base));
        else
            document["impossible"].push_back(
                {{"field", w.change.field}, {"from", w.change.from}, {"to", w.change.to}, {"reason", w.impossible}});
    }
    document["front"] = Json::array();
    for (const search::FrontPoint& point : e.front) {
        Json entry = {{"changes", changes_json(point.changes)}};
        entry.update(figures(point.estimate));
        document["front"].push_back(std::move(entry));
    }
    if (versus != nullptr)
        document["versus"] = {{"fields", changes_json(versus->fields)},
                              {"there", figures(versus->there)},
                              {"breakdown", differences_json(versus->parts, "part", "seconds", 1.0)},
                              {"by_kind", differences_json(versus->kinds, "kind", "seconds", 1.0)},
                              {"memory", differences_json(versus->memory, "class", "gib", gib(1.0))}};
    return stamped(schema::explain, document);
}

} // namespace moe::tools
