// Enumerates the degrees of a request and drops what divisibility excludes, counting whole subtrees at once.
#include "planner/search/search_space.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/routing.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>
#include <tuple>

namespace moe::search {
namespace {

std::vector<int> divisors(int number) {
    std::vector<int> result;
    for (int d = 1; static_cast<std::int64_t>(d) * d <= number; ++d) {
        if (number % d != 0) continue;
        result.push_back(d);
        if (d != number / d) result.push_back(number / d);
    }
    std::sort(result.begin(), result.end());
    return result;
}

// Divisors of `number`, or the pinned value alone where it divides.
std::vector<int> choices_of(int number, bool pinned, int value) {
    if (!pinned) return divisors(number);
    return number % value == 0 ? std::vector<int>{value} : std::vector<int>{};
}

// Tokens that a rank gets in one piece under context parallelism, two pieces of each sequence, at least: rows of a tile
// of attention kernels on tensor cores.
constexpr std::int64_t shortest_run = 64;

bool has_experts(const model::Model& model) {
    return std::any_of(model.kinds.begin(), model.kinds.end(),
                       [](const model::LayerKind& kind) { return kind.moe.has_value(); });
}

// Heaviest pipeline rank, most layers on one and lightest stage, from the stages' weights.
StageSplit weigh(const model::Model& model, std::int64_t seq, int pp, const std::vector<plan::Stage>& stages,
                 std::string layout) {
    const std::vector<std::int64_t> weights = plan::stage_weights(model, seq, stages);
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(pp), 0);
    std::vector<int> layers(static_cast<std::size_t>(pp), 0), held = layers;
    for (std::size_t k = 0; k < stages.size(); ++k) {
        ranks[k % static_cast<std::size_t>(pp)] += weights[k];
        layers[k % static_cast<std::size_t>(pp)] += stages[k].layers;
        held[k % static_cast<std::size_t>(pp)] += stages[k].layers + stages[k].mtp;
    }
    const double total = static_cast<double>(
        std::max<std::int64_t>(std::accumulate(weights.begin(), weights.end(), std::int64_t{0}), 1));
    constexpr double layer = 1000.0; // weight of the mean decoder layer
    StageSplit cut;
    cut.layout = std::move(layout);
    cut.possible = true;
    cut.heaviest_rank = static_cast<double>(*std::max_element(ranks.begin(), ranks.end())) * pp / total;
    cut.most_layers = layer * *std::max_element(layers.begin(), layers.end()) * pp / total;
    const auto all_held = static_cast<double>(std::accumulate(held.begin(), held.end(), 0));
    cut.most_held = *std::max_element(held.begin(), held.end()) * pp / all_held;
    cut.lightest_chunk = static_cast<double>(*std::min_element(weights.begin(), weights.end())) *
                         static_cast<double>(stages.size()) / total;
    for (int r = 0; r < pp; ++r)
        cut.mean_kept += static_cast<double>(pp - r) * layers[static_cast<std::size_t>(r)] / pp;
    return cut;
}

} // namespace

void Rejections::add(const plan::PlanFault& fault, std::int64_t count) {
    if (count == 0) return;
    Reason& reason = reasons[fault.counter];
    if (reason.count == 0) reason.message = fault.message;
    reason.count += count;
}

void Rejections::merge(const Rejections& other) {
    for (const auto& [counter, reason] : other.reasons) add({counter, reason.message}, reason.count);
}

std::int64_t Rejections::total() const {
    std::int64_t sum = 0;
    for (const auto& [counter, reason] : reasons) sum += reason.count;
    return sum;
}

SearchSpace::SearchSpace(const SearchRequest& request, const stack::Stack& stack, const plan::Plan* known)
    : base_(request.base), stack_(stack) {
    if (base_.model == nullptr || base_.model->layers.empty()) refuse("search: the request has no model");
    if (base_.hardware == nullptr) refuse("search: the request has no hardware");
    if (base_.gpus < 1 || base_.gbs < 1 || base_.seq < 1)
        refuse("search: gpus {}, gbs {}, seq {}: each must be 1 or more", base_.gpus, base_.gbs, base_.seq);
    pin(request, stack);
    combine_options(known);
    make_cuts();
    for (const machine::Precision precision : precisions(request)) {
        combine_sets(precision);
        make_families(precision);
    }
    std::sort(families_.begin(), families_.end(), [](const LayerOptions& a, const LayerOptions& b) {
        // Little tensor and context parallelism and much expert parallelism tend to be fast: with a good plan known
        // early, bounds exclude more of the rest.
        const auto key = [](const LayerOptions& f) {
            return std::tuple(static_cast<std::int64_t>(f.tp) * f.cp * f.etp, -f.ep, f.tp, f.cp, f.etp, f.precision);
        };
        return key(a) < key(b);
    });
}

std::vector<machine::Precision> SearchSpace::precisions(const SearchRequest& request) const {
    if (pinned("precision")) return {base_.precision};
    if (!request.precisions.empty()) return request.precisions;
    const bool bf16 = base_.hardware->peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] > 0.0;
    return {bf16 ? machine::Precision::bf16 : machine::Precision::fp32};
}

void SearchSpace::pin(const SearchRequest& request, const stack::Stack& stack) {
    base_.dispatcher = stack.usual_dispatcher;
    base_.cuda_graph = stack.usual_cuda_graph;
    base_.gradients = stack.usual_gradients;
    base_.ep_overlap = stack.usual_ep_overlap;
    for (const auto& [field, value] : request.fixed) {
        plan::set_field(base_, field, value);
        pinned_.insert(field);
    }
    if (pinned("routing")) plan::routing_from_string(base_.routing); // The call refuses what it cannot read.
    if (pinned("recompute"))
        if (const plan::PlanFault fault = plan::check_recompute(base_))
            refuse("{}: change --fix recompute", fault.message);
    sets_ = pinned("recompute") ? std::vector<unsigned>{base_.recompute} : every_set(base_.model, stack_);
    std::sort(sets_.begin(), sets_.end(), [](unsigned a, unsigned b) {
        const auto key = [](unsigned set) {
            return std::tuple((set & plan::recompute::full) != 0, std::popcount(set), set);
        };
        return key(a) < key(b);
    });
    if (pinned("optimizer"))
        optimizers_ = {base_.optimizer};
    else if (stack.bf16_moments)
        optimizers_ = {plan::OptimizerChoice{plan::Moments::bf16}, plan::OptimizerChoice{}};
    else
        optimizers_ = {plan::OptimizerChoice{}};
}

void SearchSpace::make_cuts() {
    const model::Model& model = *base_.model;
    const int units = plan::cut_units(model);
    std::map<int, std::vector<plan::Stage>> balanced; // stages by stage count: the same for every split into pp and vpp
    for (const int pp : choices_of(base_.gpus, pinned("pp"), base_.pp)) {
        for (const int vpp : chunk_counts(pp)) {
            const std::int64_t count = static_cast<std::int64_t>(pp) * vpp;
            std::vector<plan::Stage>* cut = nullptr;
            if (!pinned("layout") && count > 1 && count <= units) {
                cut = &balanced[static_cast<int>(count)];
                if (cut->empty()) *cut = plan::balanced_stages(model, base_.seq, static_cast<int>(count));
            }
            cuts_[{pp, vpp}] = cuts_of(pp, vpp, cut != nullptr ? *cut : std::vector<plan::Stage>{});
        }
    }
}

// The even cut (or the pinned layout), and the one balanced by FLOPs where it differs.
std::vector<StageSplit> SearchSpace::cuts_of(int pp, int vpp, const std::vector<plan::Stage>& balanced) const {
    plan::Plan plan = base_;
    plan.pp = pp;
    plan.vpp = vpp;
    if (!pinned("layout")) plan.layout.clear();
    std::vector<StageSplit> result;
    std::string even;
    try {
        const std::vector<plan::Stage> cut = plan::stages(plan);
        even = plan::layout_to_string(cut);
        result.push_back(weigh(*plan.model, plan.seq, pp, cut, plan.layout));
    } catch (const Error&) {
        result.push_back({.layout = plan.layout}); // check_plan() gives the reason for each candidate.
    }
    if (balanced.empty()) return result;
    std::string layout = plan::layout_to_string(balanced);
    if (layout != even) result.push_back(weigh(*plan.model, plan.seq, pp, balanced, std::move(layout)));
    return result;
}

std::vector<int> SearchSpace::chunk_counts(int pp) const {
    if (pinned("vpp")) return {base_.vpp};
    if (pp == 1 || !stack_.interleaved) return {1};
    if (pinned("schedule")) {
        if (base_.schedule == plan::ScheduleKind::one_f_one_b || base_.schedule == plan::ScheduleKind::zero_bubble)
            return {1};
        if (plan::in_a_v(base_.schedule)) return {2};
    }
    int most = static_cast<int>(base_.model->layers.size()) / pp;
    if (pinned("layout")) {
        const int count = plan::layout_stage_count(base_);
        return {std::max(count / pp, 1)};
    }
    const int layers = static_cast<int>(base_.model->layers.size());
    std::vector<int> result{1};
    const auto largest = [&](int vpp) { return (layers + pp * vpp - 1) / (pp * vpp); };
    for (int vpp = 2; vpp <= most; ++vpp)
        if (largest(vpp) < largest(vpp - 1)) result.push_back(vpp);
    if (pinned("schedule") && result.size() > 1) result.erase(result.begin()); // The first is interleaved.
    return result;
}

std::vector<std::int64_t> SearchSpace::micro_batch_sizes(int dp) const {
    if (pinned("mbs")) return {base_.mbs};
    if (base_.gbs % dp != 0) return {1};
    const std::int64_t most = base_.gbs / dp;
    std::set<std::int64_t> result;
    for (std::int64_t two = 1; two <= most; two *= 2)
        for (const std::int64_t mbs : {two, 3 * two})
            if (mbs <= most && most % mbs == 0) result.insert(mbs);
    for (std::int64_t mbs = 1; mbs <= std::min<std::int64_t>(most, every_mbs_to); ++mbs)
        if (most % mbs == 0) result.insert(mbs);
    return {result.begin(), result.end()};
}

const std::vector<StageSplit>& SearchSpace::stage_splits(int pp, int vpp) const { return cuts_.at({pp, vpp}); }

std::vector<SearchSpace::Dense> SearchSpace::dense_factors(int ranks) const {
    std::vector<Dense> result;
    for (const int tp : choices_of(ranks, pinned("tp"), base_.tp))
        for (const int cp : choices_of(ranks / tp, pinned("cp"), base_.cp))
            if (const int dp = ranks / tp / cp; !pinned("dp") || dp == base_.dp) result.push_back({tp, cp, dp});
    return result;
}

std::vector<SearchSpace::Expert> SearchSpace::expert_factors(int ranks) const {
    // A model without experts has no expert degrees to choose; pinned ones are refused by check_plan().
    const bool experts = has_experts(*base_.model);
    std::vector<Expert> result;
    for (const int etp : choices_of(ranks, pinned("etp") || !experts, base_.etp))
        for (const int ep : choices_of(ranks / etp, pinned("ep") || !experts, base_.ep))
            result.push_back({etp, ep, ranks / etp / ep});
    return result;
}

plan::Plan SearchSpace::candidate(const LayerOptions& family, const ParallelConfig& mapping, int vpp,
                                  std::int64_t mbs) const {
    plan::Plan plan = base_;
    plan.precision = family.precision;
    plan.tp = family.tp;
    plan.cp = family.cp;
    plan.ep = family.ep;
    plan.etp = family.etp;
    plan.pp = mapping.pp;
    plan.dp = mapping.dp;
    plan.edp = mapping.edp;
    plan.vpp = vpp;
    plan.mbs = mbs;
    if (!pinned("schedule"))
        plan.schedule = vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
    plan.recompute = sets_.front();
    plan.optimizer = optimizers_.front();
    if (!pinned("ep_overlap") && plan.ep == 1) plan.ep_overlap = false;
    return plan;
}

// The dense degrees that are possible with unsplit experts; the others are counted for every expert factoring at once.
std::vector<SearchSpace::Dense> SearchSpace::sound_dense(machine::Precision precision, int pp, std::int64_t cuts,
                                                         const std::vector<Expert>& experts) {
    const int ranks = base_.gpus / pp;
    const std::vector<Dense> all = dense_factors(ranks);
    const auto per_size = [&](const Dense& d) {
        std::int64_t sum = 0;
        for (const Expert& e : experts) sum += cuts * choices(d.tp, d.cp, e.ep, e.etp, pp);
        return sum;
    };
    const int units = static_cast<int>(base_.model->layers.size() + base_.model->mtp.size()) + 1;
    if (!pinned("layout") && pp > units) {
        for (const Dense& d : all)
            rejected_.add(
                {"pp*vpp > layers", fmt::format("pp = {} stages, but {} has {}: use fewer stages", pp,
                                                base_.model->name, counted(base_.model->layers.size(), "layer"))},
                static_cast<std::int64_t>(micro_batch_sizes(d.dp).size()) * per_size(d));
        return {};
    }
    std::vector<Dense> sound;
    for (const Dense& d : all) {
        if (!stack_.executable && !pinned("cp") && d.cp > 1 && base_.seq < 2 * shortest_run * d.cp) {
            rejected_.add({"runs of tokens too short",
                           fmt::format("cp = {}: runs of {} tokens; kernels of attention work on tiles of {}", d.cp,
                                       base_.seq / (2 * d.cp), shortest_run)},
                          static_cast<std::int64_t>(micro_batch_sizes(d.dp).size()) * per_size(d));
            continue;
        }
        plan::Plan plan = candidate({precision, d.tp, d.cp, 1, 1, {}}, {1, d.dp, ranks}, 1, 1);
        plan.gpus = ranks; // One stage stands for all of them: the rules about stages are asked later, of each cut.
        const std::vector<plan::PlanFault> reasons = faults(plan);
        for (const plan::PlanFault& fault : reasons) rejected_.add(fault, per_size(d));
        if (reasons.empty()) sound.push_back(d);
    }
    return sound;
}

void SearchSpace::make_families(machine::Precision precision) {
    std::map<std::tuple<int, int, int, int>, LayerOptions> found;
    for (const int pp : choices_of(base_.gpus, pinned("pp"), base_.pp)) {
        const int ranks = base_.gpus / pp;
        std::int64_t cut_count = 0;
        for (const int vpp : chunk_counts(pp)) cut_count += static_cast<std::int64_t>(stage_splits(pp, vpp).size());
        const std::vector<Expert> experts = expert_factors(ranks);
        const auto sound = sound_dense(precision, pp, cut_count, experts);
        if (sound.empty()) continue;
        for (const Expert& e : experts) {
            const Dense& one = sound.front(); // Experts are unsplit in it, so only the expert degrees can fail.
            plan::Plan plan = candidate({precision, one.tp, one.cp, e.ep, e.etp, {}}, {1, one.dp, e.edp}, 1, 1);
            plan.gpus = ranks;
            const std::vector<plan::PlanFault> reasons = faults(plan);
            for (const Dense& d : sound) {
                const LayerOptions alone{precision, d.tp, d.cp, e.ep, e.etp, {}};
                const ParallelConfig mapping{pp, d.dp, e.edp};
                if (const plan::PlanFault fault =
                        reasons.empty() ? fault_of_mapping(alone, mapping) : reasons.front()) {
                    rejected_.add(fault, static_cast<std::int64_t>(micro_batch_sizes(d.dp).size()) * cut_count *
                                             choices(d.tp, d.cp, e.ep, e.etp, pp));
                    continue;
                }
                LayerOptions& family = found.try_emplace({d.tp, d.cp, e.ep, e.etp}, alone).first->second;
                family.parallel_configs.push_back(mapping);
            }
        }
    }
    for (auto& [key, family] : found) families_.push_back(std::move(family));
}

} // namespace moe::search
