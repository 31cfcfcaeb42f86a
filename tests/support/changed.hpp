// A config with some fields changed or added.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

// `more` is a list of fields without braces, R"("hidden_size": 64, "vocab_size": 256)"; empty: the config as it is.
inline std::string changed(const std::string& config, const std::string& more) {
    nlohmann::ordered_json whole = nlohmann::ordered_json::parse(config);
    whole.update(nlohmann::ordered_json::parse("{" + more + "}"));
    return whole.dump();
}
