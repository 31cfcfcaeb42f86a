// Every field of a config of every family that is read, with values that no config has: read, or refused in one line.
#include "planner/base/files.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

using namespace moe;
using Json = nlohmann::ordered_json;

namespace {

const std::vector<Json> odd{
    nullptr, -1, 0, 1e30, 3.5, "x", Json::array(), Json::object(), true, Json::array({nullptr})};

// What is wrong with how a config is read; "" where it is read to finite figures or refused as it should be.
std::string complaint(const Json& config) {
    double flops = 0.0;
    std::string fault;
    try {
        fault = fault_of([&] {
            const model::Model model = families::model_from_json(config.dump(), "config.json");
            families::unread_fields(model);
            flops = model::model_flops_per_token(model, 4096);
        });
    } catch (const std::exception& error) {
        return std::string("not an Error of ours: ") + error.what();
    }
    if (fault.empty()) return std::isfinite(flops) && flops >= 0.0 ? "" : "figures are not finite";
    if (!fault.starts_with("2: config.json") || fault.find('\n') != std::string::npos) return fault;
    return {};
}

// The config with one field changed, at the top or in an object of it, or left out.
std::vector<std::string> complaints(const Json& config) {
    std::vector<std::string> list;
    const auto tell = [&](const std::string& what, const Json& changed) {
        if (const std::string text = complaint(changed); !text.empty()) list.push_back(what + ": " + text);
    };
    for (const auto& [key, value] : config.items()) {
        Json changed = config;
        for (const Json& other : odd) changed[key] = other, tell(key, changed);
        changed.erase(key);
        tell(key + " left out", changed);
        if (!value.is_object()) continue;
        for (const auto& [inner, old] : value.items()) {
            changed = config;
            for (const Json& other : odd) changed[key][inner] = other, tell(key + "." + inner, changed);
        }
    }
    return list;
}

} // namespace

TEST_CASE("odd values: every field of a config of every family is read or refused in one line") {
    std::istringstream table(read_file(profiles_folder() + "/../tests/planner/model/transformers/configs.jsonl"));
    int families_tried = 0;
    for (std::string line; std::getline(table, line);) {
        const Json row = Json::parse(line);
        const bool read = row["config"].size() > 2; // Others have the two fields that name them.
        if (!read || row["sizes"] != "small") continue;
        ++families_tried;
        const std::string type = row["model_type"];
        CAPTURE(type);
        const std::vector<std::string> found = complaints(row["config"]);
        CHECK_MESSAGE(found.empty(), (found.empty() ? "" : found.front()));
    }
    CHECK(families_tried > 60);
}
