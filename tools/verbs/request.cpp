// Checks options and builds the request of search and explain.
#include "tools/verbs/request.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/routing.hpp"
#include "planner/search/thrifty.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

void check_range(const char* option, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most) refuse("{} {}: must be between 1 and {}", option, value, most);
}

std::vector<machine::Precision> precisions_of(const std::string& list) {
    std::vector<machine::Precision> result;
    for (std::size_t at = 0; at < list.size();) {
        const std::size_t end = std::min(list.find(',', at), list.size());
        const machine::Precision precision = machine::precision_from_string(list.substr(at, end - at));
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

// Every field is pinned once, and not beside the option that lists its values.
std::vector<std::pair<std::string, std::string>> fixed_fields(const SearchOptions& options) {
    std::vector<std::pair<std::string, std::string>> fields;
    for (const std::string& text : options.fix) {
        const auto& [field, value] = fields.emplace_back(fixed_field(text));
        for (const auto& [earlier, other] : fields)
            if (&earlier != &field && earlier == field)
                refuse("--fix {0}={1} --fix {0}={2}: a field has one value: leave one of them out", field, other,
                       value);
        if (field == "precision" && !options.precisions.empty())
            refuse("--precision {} --fix precision={}: both say the precision: leave one of them out",
                   options.precisions, value);
    }
    return fields;
}

routing::SkewPoint point_of(const std::string& name) {
    if (name == "mean") return routing::SkewPoint::mean;
    if (name == "p50") return routing::SkewPoint::p50;
    if (name == "p99") return routing::SkewPoint::p99;
    refuse("--optimize-for {}: must be mean, p50 or p99", name);
}

// A histogram is read once before any plan is: a file that cannot be read would else exclude plan by plan.
void check_histogram(const SearchOptions& options, const model::Model& model) {
    for (const std::string& text : options.fix) {
        const auto [field, value] = fixed_field(text);
        if (field != "routing") continue;
        const plan::Routing routing = plan::routing_from_string(value);
        if (routing.kind != plan::RoutingKind::histogram) continue;
        const std::size_t experts = routing::load_histogram(routing.path).front().size();
        for (const model::LayerKind& kind : model.kinds)
            if (kind.moe && kind.moe->experts != static_cast<int>(experts))
                refuse("--fix routing={}: the histogram has {} experts, but the model has {}", value, experts,
                       kind.moe->experts);
    }
}

} // namespace

std::shared_ptr<const machine::Hardware> with_headroom(const std::shared_ptr<const machine::Hardware>& hardware,
                                                       double headroom) {
    if (headroom == 0.0) return hardware;
    if (!(headroom > 0.0 && headroom < 1.0))
        refuse("--memory-headroom {}: must be a share of the memory, from 0 to below 1", headroom);
    machine::Hardware less = *hardware;
    less.memory_bytes *= 1.0 - headroom;
    if (less.context_bytes >= less.memory_bytes)
        refuse("--memory-headroom {}: leaves {:.3g} GiB, and the context alone takes {:.3g}", headroom,
               less.memory_bytes / 0x1p30, less.context_bytes / 0x1p30);
    return std::make_shared<const machine::Hardware>(std::move(less));
}

void check_spare_experts(std::int64_t spare_experts) { check_range("--spare-experts", spare_experts, 1024); }

stack::Stack stack_in(const std::string& file, const char* field, const std::string& name,
                      const machine::Hardware& hardware) {
    try {
        return stack::load_stack(name, hardware);
    } catch (const Error& error) {
        const std::string text = error.what();
        if (error.fault() != Fault::bad_input || text.rfind("unknown stack", 0) != 0) throw;
        refuse("{}: {}: {}", file, field, text);
    }
}

stack::Stack stack_of_plan(const plan::Plan& plan, const std::string& file) {
    return stack_in(file, "stack", plan.stack, *plan.hardware);
}

Request request_of(const SearchOptions& options) {
    check_spare_experts(options.spare_experts);
    if (options.gpus != SearchOptions::fewest_gpus) check_range("--gpus", options.gpus, 10'000'000);
    for (const std::int64_t gpus : options.more_gpus) check_range("--gpus", gpus, 10'000'000);
    check_range("--gbs", options.gbs, std::int64_t{1} << 40);
    check_range("--seq", options.seq, std::int64_t{1} << 40);
    check_range("--top", options.top, 1000);
    Request request;
    plan::Plan& base = request.search.base;
    base.model = std::make_shared<const model::Model>(families::load_model(options.model));
    request.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(options.hardware));
    request.stack = options.stack.empty() ? stack_in(options.hardware, "default_stack", request.hardware->default_stack,
                                                     *request.hardware)
                                          : stack::load_stack(options.stack, *request.hardware);
    request.headroom = options.memory_headroom.value_or(request.stack.memory_headroom);
    base.hardware = with_headroom(request.hardware, request.headroom);
    base.stack = request.stack.name;
    base.gpus = static_cast<int>(std::max<std::int64_t>(options.gpus, 1));
    base.gbs = options.gbs;
    base.seq = options.seq;
    request.search.precisions = precisions_of(options.precisions);
    request.search.fixed = fixed_fields(options);
    if (!options.lengths.empty()) {
        base.documents = plan::Documents::mask;
        base.lengths = model::to_string(model::read_document_lengths(options.lengths));
        for (const auto& [field, value] : request.search.fixed)
            if (field == "lengths" || (field == "documents" && value != "mask"))
                refuse("--lengths {} --fix {}={}: lengths are of documents that are masked: leave one of them out",
                       options.lengths, field, value);
    }
    check_histogram(options, *base.model);
    request.search.top = static_cast<int>(options.top);
    request.point = point_of(options.optimize_for);
    return request;
}

void settle_gpus(const SearchOptions& options, Request& request, search::Estimator& estimator) {
    if (options.gpus != SearchOptions::fewest_gpus) return;
    const auto fewest =
        search::fewest_gpus(request.search, request.stack, estimator, 1, SearchOptions::most_for_fewest);
    if (!fewest)
        infeasible("--gpus auto: no plan for up to {}: shorten --seq, change --gbs{}, or take GPUs with more memory",
                   counted(SearchOptions::most_for_fewest, "GPU"), options.fix.empty() ? "" : ", unfix a field");
    request.search.base.gpus = fewest->first;
}

void warn_left_out(Console& console, const model::Model& model) {
    if (const std::vector<std::string> unread = families::unread_fields(model); !unread.empty())
        console.warn(
            "warning: {}: no meaning is known here of {}: if one changes what the model computes, figures miss it",
            model.name, fmt::join(unread, ", "));
    if (model.left_out.empty()) return;
    console.warn("warning: {}: plans and figures are of the language model alone; left out: {}", model.name,
                 fmt::join(model.left_out, ", "));
}

} // namespace moe::tools
