// Fields of the documents in the order of docs/schemas.
#include "tools/report/measured_documents.hpp"

#include "planner/base/schema.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_listed = 100, most_name = 300;

// JSON needs UTF-8, which names in a database need not be.
std::string ascii(const std::string& name) {
    std::string text = name.substr(0, most_name);
    for (char& c : text)
        if (c < ' ' || c > '~') c = '?';
    return text;
}

Json outliers_json(const std::vector<LogOutlier>& outliers) {
    Json list = Json::array();
    for (std::size_t i = 0; i < std::min(outliers.size(), most_listed); ++i)
        list.push_back({{"iteration", outliers[i].iteration}, {"seconds", outliers[i].seconds}});
    return list;
}

Json row_json(const ProfileRow& row) {
    Json kinds = Json::array();
    for (const program::OpKind kind : row.kinds) kinds.push_back(program::to_string(kind));
    return {{"kind", row.name},
            {"kinds", std::move(kinds)},
            {"communication", row.communication},
            {"count", row.count},
            {"kernels", row.kernels},
            {"predicted_seconds", row.predicted},
            {"predicted_wait_seconds", row.predicted_wait},
            {"measured_seconds", row.measured}};
}

} // namespace

std::string log_comparison_document(const LogComparison& c) {
    Json document = {{"engine", c.engine},
                     {"format", c.format},
                     {"predicted_tflops_per_gpu", c.predicted_tflops},
                     {"measured_tflops_per_gpu", c.measured_tflops},
                     {"logged_tflops_per_gpu", or_null(c.logged_tflops)},
                     {"error", c.error()},
                     {"predicted_step_seconds", c.predicted_seconds},
                     {"measured_step_seconds", c.measured_seconds},
                     {"step_seconds_from", to_string(c.time)},
                     {"predicted_memory_gib", c.predicted_memory_gib},
                     {"measured_memory_gib", or_null(c.measured_memory_gib())},
                     {"measured_allocated_gib", or_null(c.allocated_gib)},
                     {"measured_reserved_gib", or_null(c.reserved_gib)},
                     {"iterations", c.iterations},
                     {"logged_iterations", c.logged},
                     {"warm_up", c.warm_up},
                     {"other_batch", c.other_batch},
                     {"skipped", c.skipped},
                     {"outlier_count", c.outliers.size()},
                     {"outliers", outliers_json(c.outliers)}};
    document["spread"] = {
        {"low_seconds", c.low}, {"high_seconds", c.high}, {"relative", (c.high - c.low) / c.measured_seconds}};
    document["first_loss"] = or_null(c.first_loss);
    document["last_loss"] = or_null(c.last_loss);
    document["runs"] = c.runs;
    document["cut"] = c.cut;
    document["warnings"] = c.warnings;
    return stamped(schema::compare_log, document);
}

double measured_tflops(const ProfileComparison& comparison, const ProfileSubject& subject) {
    return subject.predicted_tflops * comparison.predicted.step / comparison.measured.step;
}

std::string profile_comparison_document(const ProfileComparison& c, const ProfileSubject& subject,
                                        const DeviceProfile& profile, const ProfiledSteps& steps) {
    const double tflops = measured_tflops(c, subject);
    Json document = {{"source", profile.source},
                     {"gpu", ascii(profile.gpu)},
                     {"kernel_table", subject.table},
                     {"rank", subject.rank},
                     {"rank_known", subject.rank_known},
                     {"pipeline_rank", subject.pipeline_rank},
                     {"represents", subject.represents},
                     {"devices", c.devices},
                     {"steps_said", steps.said},
                     {"kernels_outside", steps.outside},
                     {"predicted_tflops_per_gpu", subject.predicted_tflops},
                     {"measured_tflops_per_gpu", tflops},
                     {"error", subject.predicted_tflops / tflops - 1.0},
                     {"predicted_step_seconds", c.predicted.step},
                     {"measured_step_seconds", c.measured.step},
                     {"predicted_exposed_communication_seconds", c.predicted.exposed},
                     {"measured_exposed_communication_seconds", c.measured.exposed},
                     {"predicted_idle_seconds", c.predicted.idle},
                     {"measured_idle_seconds", c.measured.idle},
                     {"kernel_seconds", c.kernel_seconds},
                     {"unmatched_seconds", c.unmatched_seconds},
                     {"unmatched_share", c.kernel_seconds > 0.0 ? c.unmatched_seconds / c.kernel_seconds : 0.0}};
    document["steps"] = Json::array();
    for (const ProfiledStep& step : steps.steps)
        document["steps"].push_back({{"step", step.number}, {"seconds", step.seconds}});
    document["by_kind"] = Json::array();
    for (const ProfileRow& row : c.rows) document["by_kind"].push_back(row_json(row));
    document["streams"] = Json::array();
    for (const StreamUse& use : c.streams)
        document["streams"].push_back({{"device", ascii(use.device)},
                                       {"stream", use.stream},
                                       {"kernels", use.kernels},
                                       {"seconds", use.seconds},
                                       {"communication_seconds", use.communication}});
    document["unmatched_names"] = c.unmatched.size();
    document["unmatched"] = Json::array();
    for (std::size_t i = 0; i < std::min(c.unmatched.size(), most_listed); ++i)
        document["unmatched"].push_back({{"name", ascii(c.unmatched[i].name)},
                                         {"kernels", c.unmatched[i].kernels},
                                         {"seconds", c.unmatched[i].seconds},
                                         {"share", c.unmatched[i].share}});
    document["warnings"] = subject.warnings;
    return stamped(schema::compare_profile, document);
}

} // namespace moe::tools
