// Says how much a step was corrected and which runs weigh most in that.
#include "tools/report/correction.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace moe::tools {

std::string correction_line(const published::Correction* correction) {
    if (correction == nullptr) return "Not corrected by runs nearby";
    return fmt::format("Corrected by runs nearby (neighbours): step x {:.3f}", correction->factor());
}

std::string correction_text(const published::Correction* correction) {
    std::string text = correction_line(correction);
    if (correction == nullptr) return text;
    for (const published::Influence& run : correction->nearest)
        text += fmt::format("\n  {}: error {:+.1f}%, weight {:.2f}", run.run_id, 100.0 * std::expm1(run.log_error),
                            run.weight);
    return text;
}

nlohmann::ordered_json correction_json(const published::Correction* correction) {
    if (correction == nullptr) return nullptr;
    nlohmann::ordered_json json{{"factor", correction->factor()},
                                {"deviation", correction->deviation},
                                {"runs", nlohmann::ordered_json::array()}};
    for (const published::Influence& run : correction->nearest)
        json["runs"].push_back({{"run_id", run.run_id}, {"error", std::expm1(run.log_error)}, {"weight", run.weight}});
    return json;
}

} // namespace moe::tools
