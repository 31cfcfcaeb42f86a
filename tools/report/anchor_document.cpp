// Runs with their predictions and interval factors before and after, and the coefficients that could move.
#include "tools/report/anchor_document.hpp"

#include "planner/base/schema.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

#include <cmath>

namespace moe::tools {

std::string anchor_document(const Anchoring& anchoring, const std::string& out) {
    using Json = nlohmann::ordered_json;
    // Ends of an interval over the prediction that it is around.
    const auto factors = [](const published::Interval& interval, double predicted) {
        return Json{interval.low / predicted, interval.high / predicted};
    };
    Json document{{"base", anchoring.stack.base}, {"runs", Json::array()}, {"coefficients", Json::array()}};
    for (const Anchoring::Run& run : anchoring.runs)
        document["runs"].push_back({{"run_id", run.run_id},
                                    {"measured_tflops_per_gpu", run.measured},
                                    {"before",
                                     {{"predicted_tflops_per_gpu", run.before},
                                      {"log_residual", std::log(run.before / run.measured)},
                                      {"interval_factors", factors(run.interval_before, run.before)}}},
                                    {"after",
                                     {{"predicted_tflops_per_gpu", run.after},
                                      {"log_residual", std::log(run.after / run.measured)},
                                      {"interval_factors", factors(run.interval_after, run.after)}}}});
    for (const Anchoring::Moved& m : anchoring.coefficients)
        document["coefficients"].push_back({{"name", m.name},
                                            {"unit", m.unit},
                                            {"before", m.before},
                                            {"after", m.after},
                                            {"error_before", m.error_before},
                                            {"error_after", m.error_after}});
    document["out"] = out;
    return stamped(schema::anchor, document);
}

} // namespace moe::tools
