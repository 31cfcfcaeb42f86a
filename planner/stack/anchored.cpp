// Reads and writes anchored stacks as JSON.
#include "planner/stack/anchored.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/schema.hpp"

#include <nlohmann/json.hpp>

#include <string_view>

namespace moe::stack {
namespace {

MeasuredRun run_from(const JsonObject& json) {
    json.only({"run_id", "model", "family", "hardware", "generation", "precision", "stack", "software", "gpus", "seq",
               "log_error", "noise"});
    MeasuredRun run;
    run.run_id = json.string("run_id");
    run.workload = {json.string("model"),      json.string("family"),         json.string("hardware"),
                    json.string("generation"), json.string("precision"),      json.string("stack"),
                    json.string("software"),   json.number("gpus", 1.0, 1e9), json.number("seq", 1.0, 1e12)};
    run.log_error = json.number("log_error", -20.0, 20.0);
    run.noise = json.number("noise", 1e-6, 10.0);
    return run;
}

} // namespace

bool names_file(const std::string& word) { return std::string_view(word).ends_with(".json"); }

AnchoredStack load_anchored(const std::string& path) {
    const JsonObject json = JsonObject::parse(read_file(path), path);
    check_schema(json, schema::anchored_stack);
    if (!json.has("schema") && !json.has("runs"))
        refuse("{}: not a stack that calibrate --anchor wrote: give one, or a name of show stacks without .json", path);
    json.only({"schema", "base", "source", "coefficients", "runs"});
    AnchoredStack stack;
    stack.base = json.string("base");
    if (stack.base.empty() || stack.base.find(".json") != std::string::npos)
        json.refuse_value("base", "must be the name of a stack in profiles/stacks");
    stack.source = json.string("source");
    const JsonObject coefficients = json.object("coefficients");
    for (const std::string& name : coefficients.keys())
        stack.coefficients[name] = coefficients.number(name, 1e-12, 1e12);
    for (const JsonObject& run : json.objects("runs")) stack.runs.push_back(run_from(run));
    return stack;
}

std::string to_json(const AnchoredStack& stack) {
    constexpr int digits = 5;
    nlohmann::ordered_json json{{"schema", schema::anchored_stack},
                                {"base", stack.base},
                                {"source", stack.source},
                                {"coefficients", nlohmann::ordered_json::object()},
                                {"runs", nlohmann::ordered_json::array()}};
    for (const auto& [name, value] : stack.coefficients) json["coefficients"][name] = rounded_to(value, digits);
    for (const MeasuredRun& run : stack.runs) {
        const Workload& w = run.workload;
        json["runs"].push_back({{"run_id", run.run_id},
                                {"model", w.model},
                                {"family", w.family},
                                {"hardware", w.hardware},
                                {"generation", w.generation},
                                {"precision", w.precision},
                                {"stack", w.stack},
                                {"software", w.software},
                                {"gpus", w.gpus},
                                {"seq", w.seq},
                                {"log_error", rounded_to(run.log_error, digits)},
                                {"noise", rounded_to(run.noise, digits)}});
    }
    return json.dump(1) + "\n";
}

} // namespace moe::stack
