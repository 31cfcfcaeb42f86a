// The verb search: explores the plan space of a request, prints the best plans and writes the first.
#include "planner/search.hpp"
#include "planner/error.hpp"
#include "planner/files.hpp"
#include "simulator/skew.hpp"
#include "tools/console.hpp"
#include "tools/documents.hpp"
#include "tools/table.hpp"
#include "tools/verbs.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

void check_range(const char* option, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most) refuse("{} {}: must be between 1 and {}", option, value, most);
}

std::vector<Precision> precisions_of(const std::string& list) {
    std::vector<Precision> result;
    for (std::size_t at = 0; at < list.size();) {
        const std::size_t end = std::min(list.find(',', at), list.size());
        const Precision precision = precision_from_string(list.substr(at, end - at));
        if (std::find(result.begin(), result.end(), precision) == result.end()) result.push_back(precision);
        at = end + 1;
    }
    return result;
}

std::pair<std::string, std::string> fixed_field(const std::string& text) {
    const std::size_t at = text.find('=');
    if (at == std::string::npos || at == 0 || at + 1 == text.size())
        refuse("--fix {}: must be FIELD=VALUE, for example --fix tp=2", text);
    return {text.substr(0, at), text.substr(at + 1)};
}

SearchRequest request_of(const SearchOptions& options, const Stack& stack, std::shared_ptr<const Model> model,
                         std::shared_ptr<const Hardware> hardware) {
    SearchRequest request;
    request.base.model = std::move(model);
    request.base.hardware = std::move(hardware);
    request.base.stack = stack.name;
    request.base.gpus = static_cast<int>(options.gpus);
    request.base.gbs = options.gbs;
    request.base.seq = options.seq;
    request.precisions = precisions_of(options.precisions);
    for (const std::string& fix : options.fix) request.fixed.push_back(fixed_field(fix));
    request.top = static_cast<int>(options.top);
    return request;
}

SkewPoint point_of(const std::string& name) {
    if (name == "mean") return SkewPoint::mean;
    if (name == "p50") return SkewPoint::p50;
    if (name == "p99") return SkewPoint::p99;
    refuse("--optimize-for {}: must be mean, p50 or p99", name);
}

std::string degree(std::int64_t value) { return fmt::format("{}", value); }

void print_plans(Console& console, const SearchResult& result) {
    Table table({"", "TFLOPS/GPU", "tokens/s/GPU", "step", "GiB", "TP", "CP", "DP", "PP", "VPP", "EP", "ETP", "MBS",
                 "<precision", "<recompute"});
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        const auto& [plan, estimate] = result.plans[i];
        table.add({fmt::format("{}", i + 1), fmt::format("{:.4g}", estimate.tflops_per_gpu),
                   count_text(estimate.tokens_per_second_per_gpu), seconds_text(estimate.step_seconds),
                   gib_text(estimate.memory_bytes), degree(plan.tp), degree(plan.cp), degree(plan.dp), degree(plan.pp),
                   degree(plan.vpp), degree(plan.ep), degree(plan.etp), degree(plan.mbs), to_string(plan.precision),
                   recompute::to_string(plan.recompute)});
    }
    console.line(table.text());
}

void print_counts(Console& console, const SearchResult& result) {
    std::vector<std::pair<std::string, std::int64_t>> reasons(result.pruned.begin(), result.pruned.end());
    std::stable_sort(reasons.begin(), reasons.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    std::int64_t pruned = 0;
    std::string listed;
    for (const auto& [reason, count] : reasons) {
        pruned += count;
        listed += fmt::format("{}{} {}", listed.empty() ? ": " : ", ", reason, count_text(static_cast<double>(count)));
    }
    console.say("\n{} plans evaluated and {} excluded in {}{}", count_text(static_cast<double>(result.evaluated)),
                count_text(static_cast<double>(pruned)), seconds_text(result.seconds), listed);
}

} // namespace

void search_verb(const SearchOptions& options) {
    check_range("--gpus", options.gpus, 10'000'000);
    check_range("--gbs", options.gbs, std::int64_t{1} << 40);
    check_range("--seq", options.seq, std::int64_t{1} << 40);
    check_range("--top", options.top, 1000);
    const auto model = std::make_shared<const Model>(load_model(options.model));
    const auto hardware = std::make_shared<const Hardware>(load_hardware(options.hardware));
    const Stack stack = load_stack(options.stack, *hardware);
    SearchRequest request = request_of(options, stack, model, hardware);

    Console console(options.json);
    request.progress = [&console](std::int64_t evaluated, std::int64_t pruned) {
        console.progress(fmt::format("{} plans evaluated, {} excluded", count_text(static_cast<double>(evaluated)),
                                     count_text(static_cast<double>(pruned))));
    };
    SkewedEstimator estimator(hardware, stack, point_of(options.optimize_for));
    const SearchResult result = search(request, stack, estimator);
    if (!options.out.empty()) write_file(options.out, plan_to_json(result.plans.front().first));

    if (options.json) return print(search_document(result));
    console.say("{} on {} x {}, stack {}, batch {} x {} tokens\n", model->name, options.gpus, hardware->name,
                stack.name, options.gbs, options.seq);
    print_plans(console, result);
    print_counts(console, result);
    if (options.out.empty())
        console.say("Keep the best plan with --out plan.json");
    else
        console.say("Plan 1 is in {0}; next: moe-plan replay {0} --trace trace.json", options.out);
}

} // namespace moe::tools
