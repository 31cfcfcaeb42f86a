// Reads and writes profiles/runs/neighbours.json.
#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/schema.hpp"
#include "simulator/published/neighbours.hpp"

#include <nlohmann/json.hpp>

#include <cmath>

namespace moe::published {
namespace {

constexpr std::array<const char*, feature_count> names{"model", "family",   "hardware", "generation", "precision",
                                                       "stack", "software", "gpus",     "seq"};

Spread spread_of(const JsonObject& json, const std::string& key) {
    const std::vector<double> pair = json.numbers(key, -100.0, 100.0);
    if (pair.size() != 2 || pair[0] > pair[1]) json.refuse_value(key, "must be [low, high]");
    return {pair[0], pair[1]};
}

double rounded(double value) { return rounded_to(value, 4); }

nlohmann::ordered_json pair_of(const Spread& spread) { return {rounded(spread.low), rounded(spread.high)}; }
nlohmann::ordered_json pair_of(const Coverage& c) { return {rounded(c.inside), rounded(c.width)}; }

Coverage coverage_of(const JsonObject& json, const std::string& key) {
    const std::vector<double> pair = json.numbers(key, 0.0, 100.0);
    if (pair.size() != 2 || pair[0] > 1.0) json.refuse_value(key, "must be [share inside, width]");
    return {pair[0], pair[1]};
}

LeftOutCoverage left_out_coverage(const JsonObject& json) {
    json.only({"left_out", "all", "systems"});
    LeftOutCoverage way{json.string("left_out"), coverage_of(json, "all"), {}};
    const JsonObject systems = json.object("systems");
    for (const std::string& system : systems.keys()) way.systems[system] = coverage_of(systems, system);
    return way;
}

} // namespace

const char* to_string(Feature feature) { return names[static_cast<std::size_t>(feature)]; }

NeighbourModel neighbour_model_from_json(const std::string& text, const std::string& place) {
    const JsonObject json = JsonObject::parse(text, place);
    check_schema(json, schema::neighbours);
    json.only(
        {"schema", "source", "deviation", "unseen", "new_release", "distance", "noise", "most", "spread", "coverage"});
    NeighbourModel model;
    model.source = json.string("source");
    model.deviation = json.number("deviation", 1e-6, 10.0);
    model.unseen = json.number("unseen", 0.1, 100.0);
    if (json.has("new_release")) model.new_release = json.number("new_release", 0.0, 10.0);
    model.most = json.number("most", 1e-3, 10.0);
    const JsonObject distance = json.object("distance");
    distance.only({names.begin(), names.end()});
    for (std::size_t i = 0; i < names.size(); ++i) model.distance[i] = distance.number(names[i], 0.0, 1e3);
    const JsonObject noise = json.object("noise");
    for (const std::string& tier : noise.keys()) model.noise[tier] = noise.number(tier, 1e-6, 10.0);
    if (!model.noise.contains("A")) noise.refuse_value("A", "must be there");
    const JsonObject spread = json.object("spread");
    spread.only({"all", "new_family", "new_system", "systems"});
    model.all = spread_of(spread, "all");
    model.new_family = spread_of(spread, "new_family");
    model.new_system = spread_of(spread, "new_system");
    const JsonObject systems = spread.object("systems");
    for (const std::string& system : systems.keys()) model.systems[system] = spread_of(systems, system);
    if (!json.has("coverage")) return model;
    for (const JsonObject& way : json.objects("coverage")) model.coverage.push_back(left_out_coverage(way));
    return model;
}

std::string to_json(const NeighbourModel& model) {
    nlohmann::ordered_json json{{"schema", schema::neighbours},
                                {"source", model.source},
                                {"deviation", rounded(model.deviation)},
                                {"unseen", rounded(model.unseen)},
                                {"new_release", rounded(model.new_release)},
                                {"distance", nlohmann::ordered_json::object()},
                                {"noise", nlohmann::ordered_json::object()},
                                {"most", model.most}};
    for (std::size_t i = 0; i < names.size(); ++i) json["distance"][names[i]] = rounded(model.distance[i]);
    for (const auto& [tier, deviation] : model.noise) json["noise"][tier] = rounded(deviation);
    json["spread"] = {{"all", pair_of(model.all)},
                      {"new_family", pair_of(model.new_family)},
                      {"new_system", pair_of(model.new_system)},
                      {"systems", nlohmann::ordered_json::object()}};
    for (const auto& [system, spread] : model.systems) json["spread"]["systems"][system] = pair_of(spread);
    json["coverage"] = nlohmann::ordered_json::array();
    for (const LeftOutCoverage& way : model.coverage) {
        nlohmann::ordered_json systems = nlohmann::ordered_json::object();
        for (const auto& [system, coverage] : way.systems) systems[system] = pair_of(coverage);
        json["coverage"].push_back({{"left_out", way.left_out}, {"all", pair_of(way.all)}, {"systems", systems}});
    }
    return json.dump(1) + "\n";
}

} // namespace moe::published
