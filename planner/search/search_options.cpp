// Options that search chooses besides degrees and cuts: one line per field, and every set of modules to recompute.
#include "planner/search/search_space.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <set>
#include <tuple>

namespace moe::search {
namespace {

template <class T>
std::vector<std::string> usual_first(const std::vector<T>& offered, T usual) {
    std::vector<std::string> words{std::string(to_string(usual))};
    for (const T value : offered)
        if (value != usual) words.emplace_back(to_string(value));
    return words;
}

// What plans of little memory have and others would not: with room for more it is open again.
bool spares_memory(const std::string& field, const plan::Plan& known) {
    return field == "ep_overlap" || (field == "fsdp" && known.fsdp);
}

bool same_but_graphs(const plan::Plan& a, const plan::Plan& b) {
    return std::tie(a.ep_overlap, a.dispatcher, a.tp_overlap, a.cp_comm, a.fsdp, a.capacity, a.paged_stash) ==
           std::tie(b.ep_overlap, b.dispatcher, b.tp_overlap, b.cp_comm, b.fsdp, b.capacity, b.paged_stash);
}

} // namespace

// A further choice is a further line. check_plan() and check_stack() drop the combinations that do not go together.
std::vector<Option> SearchSpace::options() const {
    const std::vector<std::string> off{"off"}, switched{"off", "on"};
    // A rank of ours is one thread on a CPU, which overlap does not make faster.
    const bool published = !stack_.executable, merges = stack_.ep_overlap && !base_.hardware->cpu;
    // Ranks of one process have nothing to gain from reaching each other's memory: they do already.
    std::vector<plan::Dispatcher> dispatchers = stack_.dispatchers;
    if (!published && base_.hardware->cpu) std::erase(dispatchers, plan::Dispatcher::hybridep);
    // Our whole step is one graph with any rows, so graphs of parts gain nothing: they are for those who ask.
    std::vector<plan::CudaGraph> graphs = stack_.cuda_graphs;
    if (!published) std::erase(graphs, plan::CudaGraph::partial);
    return {
        {"ep_overlap", merges ? switched : off, [](const plan::Plan& p) { return p.ep > 1; }},
        {"dispatcher", usual_first(dispatchers, stack_.usual_dispatcher),
         [](const plan::Plan& p) { return p.ep * p.etp > 1; }},
        {"cuda_graph", usual_first(graphs, stack_.usual_cuda_graph), [](const plan::Plan&) { return true; }},
        {"tp_overlap", published ? switched : off, [](const plan::Plan& p) { return p.tp > 1; }},
        {"cp_comm",
         published ? std::vector<std::string>{"ring", "alltoall", "alltoall+ring"} : std::vector<std::string>{"ring"},
         [](const plan::Plan& p) { return p.cp > 1; }},
        // FSDP in a pipeline is the distributed optimizer, see Plan::reshards().
        {"fsdp", published ? switched : off, [](const plan::Plan& p) { return p.pp == 1; }},
    };
}

// A graph of a whole step with experts needs rows that are known before the step: the capacity that the stack's recipes
// plan for, and pages that hold what backward needs of the rows there are. Where such graphs are usual, others are
// explored with the same rows, so that all share what is known of layers, unless the stack excludes that. variants()
// has the plans without a capacity.
void SearchSpace::plan_rows(plan::Plan& plan) const {
    if (stack_.usual_capacity == 0.0 || !plan::has_experts(plan) || pinned("capacity") || plan.fixed_rows()) return;
    if (plan.cuda_graph != plan::CudaGraph::full && stack_.usual_cuda_graph != plan::CudaGraph::full) return;
    plan::Plan planned = plan;
    planned.capacity = stack_.usual_capacity;
    if (!pinned("paged_stash")) planned.paged_stash = stack_.paged_stash;
    if (!stack::check_stack(planned, stack_) || stack::check_stack(plan, stack_)) plan = std::move(planned);
}

void SearchSpace::combine_options(const plan::Plan* known) {
    const std::vector<Option> all = options();
    for (unsigned bits = 0; bits < roots_.size(); ++bits) {
        std::vector<plan::Plan>& roots = roots_[bits];
        plan::Plan degrees = base_;
        degrees.tp = bits & 1U ? 2 : 1;
        degrees.cp = bits & 2U ? 2 : 1;
        degrees.ep = bits & 4U ? 2 : 1;
        degrees.etp = bits & 8U ? 2 : 1;
        degrees.pp = bits & 16U ? 2 : 1;
        roots = {degrees};
        for (const Option& option : all) {
            if (pinned(option.field)) continue;
            std::vector<plan::Plan> more;
            std::vector<std::string> values = option.values;
            if (known != nullptr && option.applies(degrees) && !spares_memory(option.field, *known))
                values = {plan::field_text(*known, option.field)};
            for (const plan::Plan& root : roots)
                for (const std::string& value : values) {
                    more.push_back(root);
                    plan::set_field(more.back(), option.field, value);
                    if (!option.applies(degrees)) break;
                }
            roots = std::move(more);
        }
        for (plan::Plan& root : roots) {
            root.recompute = 0;
            plan_rows(root);
            root.optimizer = first_optimizer(root);
            open_rules_[bits].push_back(open_rules(root));
        }
        for (const plan::Plan& root : roots)
            without_graphs_[bits].push_back(static_cast<std::size_t>(
                std::find_if(roots.begin(), roots.end(),
                             [&](const plan::Plan& other) { return same_but_graphs(other, root); }) -
                roots.begin()));
    }
}

void SearchSpace::combine_sets(machine::Precision precision) {
    std::array<std::vector<RootSets>, 64>& sets = sets_of_roots_[precision];
    for (unsigned bits = 0; bits < roots_.size(); ++bits)
        for (const bool chunks : {false, true}) {
            std::vector<RootSets>& own = sets[2 * bits + (chunks ? 1 : 0)];
            own.clear();
            for (std::size_t r = 0; r < roots_[bits].size(); ++r) {
                plan::Plan root = roots_[bits][r];
                root.precision = precision;
                root.vpp = chunks ? 2 : 1;
                own.push_back(sets_of(std::move(root), open_rules_[bits][r]));
            }
        }
}

// Rules are many, and plans of a root break few: in all but these words they are as the root is.
stack::OpenRules SearchSpace::open_rules(const plan::Plan& root) const {
    static const std::set<std::string> varying{"precision", "tp",        "cp",     "pp",        "vpp",
                                               "dp",        "ep",        "etp",    "edp",       "mbs",
                                               "schedule",  "recompute", "layout", "optimizer", "micro_batches"};
    if (stack_.rules == nullptr) return {};
    return stack::OpenRules(*stack_.rules, root, [](const std::string& word) {
        return !varying.contains(word) && !word.starts_with("derived.");
    });
}

// The one with fewer bytes that the stack allows beside the options of a root.
const plan::OptimizerChoice& SearchSpace::first_optimizer(plan::Plan root) const {
    root.recompute = 0;
    for (const plan::OptimizerChoice& choice : optimizers_)
        for (const int vpp : {1, 2}) {
            root.optimizer = choice;
            root.vpp = vpp;
            if (!stack::check_stack(root, stack_)) return choice;
        }
    return optimizers_.front();
}

const plan::OptimizerChoice& SearchSpace::optimizer(const plan::Plan& root, std::size_t n) const {
    const auto first = std::find(optimizers_.begin(), optimizers_.end(), root.optimizer) - optimizers_.begin();
    return optimizers_[(static_cast<std::size_t>(first) + n) % optimizers_.size()];
}

// Sets that the stack excludes beside a root that is sound without any; the degrees only count as above 1.
RootSets SearchSpace::sets_of(plan::Plan root, const stack::OpenRules& rules) const {
    const bool sound = !stack::check_stack(root, stack_, rules);
    RootSets result;
    for (std::size_t i = 0; i < sets_.size(); ++i) {
        root.recompute = sets_[i];
        const plan::PlanFault fault = sound ? stack::check_stack(root, stack_, rules) : plan::PlanFault{};
        if (fault)
            result.rejected.add(fault, 1);
        else
            result.sound.push_back(i);
    }
    return result;
}

std::size_t SearchSpace::degrees_above_one(int tp, int cp, int ep, int etp, int pp) {
    return (tp > 1 ? 1U : 0U) | (cp > 1 ? 2U : 0U) | (ep > 1 ? 4U : 0U) | (etp > 1 ? 8U : 0U) | (pp > 1 ? 16U : 0U);
}

const std::vector<plan::Plan>& SearchSpace::roots(int tp, int cp, int ep, int etp, int pp) const {
    return roots_[degrees_above_one(tp, cp, ep, etp, pp)];
}

const std::vector<std::size_t>& SearchSpace::without_graphs(int tp, int cp, int ep, int etp, int pp) const {
    return without_graphs_[degrees_above_one(tp, cp, ep, etp, pp)];
}

const std::vector<RootSets>& SearchSpace::sets_of_roots(const LayerOptions& options, int pp, bool chunks) const {
    const std::size_t degrees = degrees_above_one(options.tp, options.cp, options.ep, options.etp, pp);
    return sets_of_roots_.at(options.precision)[2 * degrees + (chunks ? 1 : 0)];
}

std::int64_t SearchSpace::choices(int tp, int cp, int ep, int etp, int pp) const {
    return static_cast<std::int64_t>(roots(tp, cp, ep, etp, pp).size() * sets_.size() * optimizers_.size());
}

// Every set of the stack's modules that differs in what it repeats: `moe` holds the experts' activation and the shared
// experts, `full` everything; modules that the model does not have repeat nothing.
std::vector<unsigned> SearchSpace::every_set(const std::shared_ptr<const model::Model>& model,
                                             const stack::Stack& stack) {
    using namespace plan::recompute;
    plan::Plan plan;
    plan.model = model;
    const auto& kinds = model->kinds;
    const auto some = [&kinds](const auto& has) { return std::any_of(kinds.begin(), kinds.end(), has); };
    unsigned modules = layernorm | core_attn;
    if (some([](const model::LayerKind& k) {
            return k.attention.kind == model::AttentionKind::mla ||
                   k.attention.kind == model::AttentionKind::compressed;
        }))
        modules |= mla_up_proj;
    if (some([](const model::LayerKind& k) { return k.dense(); })) modules |= mlp;
    if (plan::has_experts(plan)) modules |= moe_act | moe;
    if (some([](const model::LayerKind& k) { return k.moe && k.moe->shared_ffn > 0; })) modules |= shared_experts;
    modules &= stack.recompute_modules;
    std::vector<unsigned> sets;
    for (unsigned set = 0; set < full; ++set)
        if ((set & ~modules) == 0 && ((set & moe) == 0 || (set & (moe_act | shared_experts)) == 0)) sets.push_back(set);
    for (const unsigned alone : {full, operators})
        if ((stack.recompute_modules & alone) != 0) sets.push_back(alone);
    return sets;
}

} // namespace moe::search
