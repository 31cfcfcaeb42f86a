// Reads the routing of a plan.
#include "planner/plan/routing.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/layer_kind.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
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

double log_choose(double n, double k) {
    if (k < 0.0 || k > n) return -INFINITY;
    return std::lgamma(n + 1.0) - std::lgamma(k + 1.0) - std::lgamma(n - k + 1.0);
}

// Chance that none of `draws` distinct ones out of `all` falls among `marked`.
double miss(double all, double marked, double draws) {
    return std::exp(log_choose(all - marked, draws) - log_choose(all, draws));
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

double distinct_destinations(int experts, int top_k, int buckets, const model::Router& router) {
    if (buckets <= 1) return 1.0;
    const double per_bucket = static_cast<double>(experts) / buckets;
    const int groups = std::max(1, router.groups), kept = std::clamp(router.groups_kept, 1, groups);
    const double per_group = static_cast<double>(experts) / groups, pool = per_group * kept;
    double missed = 0.0;
    if (kept == groups) {
        missed = miss(experts, per_bucket, top_k);
    } else if (buckets >= groups) { // a bucket lies within one group, and a kept group holds at least one choice
        const double share = static_cast<double>(kept) / groups, unused = miss(pool, per_group, top_k);
        const double missed_in_kept = (miss(pool, per_bucket, top_k) - unused) / (1.0 - unused);
        missed = (1.0 - share) + share * missed_in_kept;
    } else { // a bucket holds several groups and is missed when none of them is kept
        const double inside = static_cast<double>(groups) / buckets;
        missed = std::exp(log_choose(groups - inside, kept) - log_choose(groups, kept));
    }
    return buckets * (1.0 - missed);
}

} // namespace moe::plan
