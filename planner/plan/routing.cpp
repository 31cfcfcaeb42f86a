// Reads the routing of a plan.
#include "planner/plan/routing.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/plan/plan.hpp"

#include <charconv>
#include <cmath>

namespace moe::plan {
namespace {

double number(const std::string& text, const std::string& digits, double low, const char* rule) {
    double value = 0.0;
    const char* end = digits.data() + digits.size();
    const auto [last, error] = std::from_chars(digits.data(), end, value);
    if (error != std::errc{} || last != end || !std::isfinite(value) || value < low || value > 1e6)
        refuse("routing = {}: write {}", shown(text), rule);
    return value;
}

} // namespace

Routing routing_from_string(const std::string& text) {
    Routing r;
    if (text == "balanced") return r;
    const std::size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon), rest = colon == std::string::npos ? "" : text.substr(colon + 1);
    if (kind == "dirichlet") {
        r.kind = RoutingKind::dirichlet;
        r.parameter = number(text, rest, 1e-3, "dirichlet:A with a number A of at least 0.001");
    } else if (kind == "zipf") {
        r.kind = RoutingKind::zipf;
        r.parameter = number(text, rest, 0.0, "zipf:S with a number S of at least 0");
    } else if (kind == "load") {
        constexpr const char* rule = "load:X or load:X:SPREAD with X of at least 1 and SPREAD of at least 0";
        const std::size_t second = rest.find(':');
        r.kind = RoutingKind::load;
        r.load = number(text, rest.substr(0, second), 1.0, rule);
        if (second != std::string::npos) r.spread = number(text, rest.substr(second + 1), 0.0, rule);
    } else if (text.ends_with(".json") || text.ends_with(".csv")) {
        r.kind = RoutingKind::histogram;
        r.path = text;
    } else {
        refuse("routing = {}: must be balanced, dirichlet:A, zipf:S, load:X or the .json or .csv file of a histogram",
               shown(text));
    }
    return r;
}

std::string to_string(const Routing& r) {
    switch (r.kind) {
    case RoutingKind::balanced:
        return "balanced";
    case RoutingKind::dirichlet:
        return fmt::format("dirichlet:{}", r.parameter);
    case RoutingKind::zipf:
        return fmt::format("zipf:{}", r.parameter);
    case RoutingKind::load:
        return r.spread > 0.0 ? fmt::format("load:{}:{}", r.load, r.spread) : fmt::format("load:{}", r.load);
    case RoutingKind::histogram:
        return r.path;
    }
    return {};
}

double routed_load(const Plan& plan) { return routing_from_string(plan.routing).load; }

} // namespace moe::plan
