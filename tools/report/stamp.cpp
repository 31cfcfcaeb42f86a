// Writes documents with their schema as the first field.
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

std::string stamped(const char* schema, const nlohmann::ordered_json& document) {
    nlohmann::ordered_json whole = {{"schema", schema}};
    whole.update(document);
    return whole.dump(2) + "\n";
}

} // namespace moe::tools
