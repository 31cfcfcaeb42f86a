// Says how much a step was corrected and which runs weigh most in that.
#include "tools/report/correction.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace moe::tools {

std::string correction_text(const published::Correction* correction) {
    if (correction == nullptr) return "Not corrected by runs nearby";
    std::string runs;
    for (const published::Influence& run : correction->nearest)
        runs += fmt::format("\n  {} {:+.1f}% x {:.2f}", run.run_id, 100.0 * std::expm1(run.log_error), run.weight);
    return fmt::format("Corrected by runs nearby (neighbours): step x {:.3f}; most by{}", correction->factor(), runs);
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
