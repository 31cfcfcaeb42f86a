// Writes documents with their schema as the first field.
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

nlohmann::ordered_json or_null(const std::optional<double>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

std::string stamped(const char* schema, const nlohmann::ordered_json& document) {
    nlohmann::ordered_json whole = {{"schema", schema}};
    whole.update(document);
    return whole.dump(2) + "\n";
}

} // namespace moe::tools
