// Explains an empty search: by memory with the best that was found, else by the divisibility that excluded most.
#include "planner/search/search_refusal.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/search/feasibility.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>

namespace moe::search {
namespace {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

std::string names(const std::set<std::string>& pinned) { return fmt::format("{}", fmt::join(pinned, ", ")); }

// "use 16 GPUs" where more do, and what else saves memory.
std::string memory_remedy(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator,
                          const SearchSpace& space) {
    std::vector<std::string> ways;
    constexpr std::int64_t most = 64; // times as many GPUs at most
    const std::int64_t now = request.base.gpus;
    if (const auto more = fewest_gpus(request, stack, estimator, now + 1, most * now))
        ways.push_back("use " + counted(more->first, "GPU"));
    if (!space.pinned().empty()) ways.push_back(fmt::format("unfix one of {}", names(space.pinned())));
    ways.emplace_back("shorten --seq");
    ways.emplace_back("take GPUs with more memory");
    return fmt::format("{}", fmt::join(ways, ", or "));
}

// The number of GPUs nearest to the request for which divisibility allows a plan; 0 = none near.
std::int64_t nearest_gpus(const SearchRequest& request, const stack::Stack& stack) {
    constexpr std::int64_t farthest = 64;
    for (std::int64_t distance = 1; distance <= farthest; ++distance)
        for (const std::int64_t gpus : {request.base.gpus - distance, request.base.gpus + distance}) {
            if (gpus < 1 || gpus > plan::limits::max_gpus) continue;
            if (has_plan(with_gpus(request, gpus), stack)) return gpus;
        }
    return 0;
}

// Pinned degrees that cannot be part of any factoring of the GPUs leave nothing to count.
[[noreturn]] void refuse_factoring(const SearchSpace& space) {
    const plan::Plan& base = space.base();
    const std::pair<const char*, std::int64_t> degrees[] = {{"pp", base.pp}, {"tp", base.tp},   {"cp", base.cp},
                                                            {"dp", base.dp}, {"etp", base.etp}, {"ep", base.ep}};
    for (const auto& [name, value] : degrees)
        if (space.pinned(name) && base.gpus % value != 0)
            infeasible("no plan for {}: {} = {} is fixed, which does not divide {}: change --fix {} or --gpus",
                       counted(base.gpus, "GPU"), name, value, base.gpus, name);
    infeasible(
        "no plan for {}: the fixed degrees ({}) cannot all be part of tp*cp*dp*pp = etp*ep*edp*pp = {}: unfix one "
        "of them",
        counted(base.gpus, "GPU"), names(space.pinned()), base.gpus);
}

// The reason that excluded most, of those that name a fixed field ("experts % ep" with --fix ep): a choice of the
// user's explains more than degrees that search would have chosen otherwise.
std::map<std::string, Rejections::Reason>::const_iterator pinned_reason(const SearchSpace& space,
                                                                        const Rejections& rejected) {
    auto best = rejected.reasons.end();
    for (auto it = rejected.reasons.begin(); it != rejected.reasons.end(); ++it) {
        const std::string words = " " + it->first + " ";
        const bool names_pinned =
            std::any_of(space.pinned().begin(), space.pinned().end(), [&words](const std::string& field) {
                return words.find(" " + field + " ") != std::string::npos;
            });
        if (names_pinned && (best == rejected.reasons.end() || it->second.count > best->second.count)) best = it;
    }
    return best;
}

} // namespace

void refuse_search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator,
                   const SearchSpace& space, const SearchFailure& failure) {
    const auto& reasons = failure.rejected.reasons;
    if (reasons.empty()) refuse_factoring(space);
    // No other request helps a model that the stack cannot run at all.
    if (const model::Model& model = *space.base().model; stack.executable && !model.not_executable.empty())
        infeasible("model {}: stack {} offers only what execute runs: {}: plan for a published stack with --stack",
                   model.name, stack.name, model.not_executable);
    const int gpus = space.base().gpus;
    const std::int64_t total = failure.rejected.total();
    const auto most = std::max_element(reasons.begin(), reasons.end(),
                                       [](const auto& a, const auto& b) { return a.second.count < b.second.count; });
    const auto others = [&](const std::string& but) {
        return most->first == but ? std::string()
                                  : fmt::format("; {} fail '{}'", counted(most->second.count), most->first);
    };
    // These fit into the GPUs, so that none of the larger ones is what is in the way.
    if (const auto host = reasons.find("offload > host memory"); host != reasons.end())
        infeasible("no plan for {} fits: {} of {} fail '{}' ({}): unfix offload, or use more GPUs",
                   counted(gpus, "GPU"), counted(host->second.count), counted(total, "candidate"), host->first,
                   host->second.message);
    if (failure.smallest) {
        Thrifty best{*failure.smallest, estimator.memory_bytes(*failure.smallest)};
        if (const std::optional<Thrifty> least = thriftiest(space, stack, estimator);
            least && least->bytes < best.bytes && least->bytes > space.base().hardware->memory_bytes)
            best = *least;
        const plan::Plan& p = best.plan;
        infeasible("no plan for {} fits: {} of {} fail 'memory' (best needs {:.1f} GiB of {:.1f}: tp {} cp {} "
                   "pp {} ep {} etp {} mbs {} recompute {}{}{}){}: {}",
                   counted(gpus, "GPU"), counted(reasons.at("memory").count), counted(total, "candidate"),
                   best.bytes / gib, p.hardware->memory_bytes / gib, p.tp, p.cp, p.pp, p.ep, p.etp, p.mbs,
                   plan::recompute::to_string(p.recompute), p.fsdp ? " fsdp on" : "",
                   p.offload != 0 ? " offload " + plan::offload::to_string(p.offload) : std::string(), others("memory"),
                   memory_remedy(request, stack, estimator, space));
    }
    const std::int64_t near = nearest_gpus(request, stack);
    const auto named = pinned_reason(space, failure.rejected);
    const auto& [counter, reason] = named == reasons.end() ? *most : *named;
    infeasible("no plan for {}: {} of {} fail '{}' ({}){}{}", counted(gpus, "GPU"), counted(reason.count),
               counted(total, "candidate"), counter, reason.message, others(counter),
               near == 0 ? std::string() : "; " + counted(near, "GPU") + " would do");
}

} // namespace moe::search
