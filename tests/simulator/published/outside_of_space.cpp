// Looks a plan up in the space of its request, choice by choice.
#include "tests/simulator/published/outside_of_space.hpp"

#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/search_space.hpp"
#include "planner/search/variants.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/recipe_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace moe::search {
namespace {

// Fields of the roots: what options() combines, and the rows that a whole graph plans.
const char* const root_fields[] = {"ep_overlap", "dispatcher", "cuda_graph", "tp_overlap",
                                   "cp_comm",    "fsdp",       "capacity",   "paged_stash"};

// `moe` repeats its parts anyway.
unsigned without_parts(unsigned recomputed) {
    using namespace plan::recompute;
    return (recomputed & moe) != 0 ? recomputed & ~(moe_act | shared_experts) : recomputed;
}

template <class Range, class Text>
std::string listed(const Range& range, const Text& text) {
    std::string result;
    for (const auto& one : range) {
        if (!result.empty()) result += ' ';
        result += text(one);
    }
    return result;
}

class Lookup {
public:
    Lookup(const plan::Plan& plan, const stack::Stack& stack)
        : plan_(plan), stack_(stack), space_(published::request_of(plan), stack) {}

    std::vector<OutsideField> run() {
        degrees();
        stages();
        const std::vector<std::int64_t> sizes = space_.micro_batch_sizes(plan_.dp);
        if (std::find(sizes.begin(), sizes.end(), plan_.mbs) == sizes.end())
            add("mbs", listed(sizes, [](std::int64_t size) { return std::to_string(size); }));
        choices();
        const auto& sets = space_.recompute_sets();
        if (std::find(sets.begin(), sets.end(), without_parts(plan_.recompute)) == sets.end())
            add("recompute", listed(sets, plan::recompute::to_string));
        const auto& optimizers = space_.optimizers();
        if (std::find(optimizers.begin(), optimizers.end(), plan_.optimizer) == optimizers.end())
            add("optimizer", listed(optimizers, [](const plan::OptimizerChoice& o) { return plan::to_string(o); }));
        if (plan_.offload != 0 && !stack_.offloads) add("offload", "none");
        fixed_fields();
        if (const plan::PlanFault fault = space_.fault_of(plan_); fault && outside_.empty())
            outside_.push_back({fault.counter, "", fault.message});
        return std::move(outside_);
    }

private:
    // True where search tries the plan's value on the plans that it finds.
    bool varied(const std::string& field) const {
        for (const Variation& variation : variations(stack_))
            if (variation.field == field)
                for (const std::string& value : variation.values)
                    if (value == plan::field_text(plan_, field)) return true;
        return false;
    }

    void add(const char* field, std::string words) {
        outside_.push_back({field, plan::field_text(plan_, field), std::move(words)});
    }

    void degrees() {
        const auto same = [&](const LayerOptions& f) {
            return f.tp == plan_.tp && f.cp == plan_.cp && f.ep == plan_.ep && f.etp == plan_.etp;
        };
        for (const LayerOptions& family : space_.layer_options())
            if (same(family))
                for (const ParallelConfig& mapping : family.parallel_configs)
                    if (mapping.pp == plan_.pp && mapping.dp == plan_.dp) return;
        const plan::PlanFault fault = space_.fault_of_degrees(plan_);
        outside_.push_back(
            {"tp+cp+dp+pp+ep+etp",
             fmt::format("{}+{}+{}+{}+{}+{}", plan_.tp, plan_.cp, plan_.dp, plan_.pp, plan_.ep, plan_.etp),
             fault ? fault.message : "no such degrees"});
    }

    // Chunks and the cut of the layers; a cut counts by its stages, not by its words.
    void stages() {
        const bool split = plan::splits_backward(plan_.schedule);
        const auto usual = plan_.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
        const auto& kinds = stack_.split_schedules;
        if (plan_.schedule != usual && std::find(kinds.begin(), kinds.end(), plan_.schedule) == kinds.end())
            add("schedule", to_string(usual));
        if (split) return; // Its chunks and cuts are those of sound_cuts().
        const std::string own = plan::layout_to_string(plan::stages(plan_));
        const std::vector<int> chunks = space_.chunk_counts(plan_.pp);
        for (const int vpp : chunks) {
            plan::Plan found = plan_;
            found.vpp = vpp;
            found.schedule = vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
            found.layout = space_.stage_splits(plan_.pp, vpp).back().layout;
            for (const plan::Plan& cut : recut(found, stack_, {}))
                if (cut.vpp == plan_.vpp && plan::layout_to_string(plan::stages(cut)) == own) return;
        }
        if (std::find(chunks.begin(), chunks.end(), plan_.vpp) == chunks.end()) {
            add("vpp", listed(chunks, [](int count) { return std::to_string(count); }));
            return;
        }
        std::vector<std::string> cuts;
        for (const StageSplit& cut : space_.stage_splits(plan_.pp, plan_.vpp)) {
            if (!cut.possible) continue;
            plan::Plan other = plan_;
            other.layout = cut.layout;
            cuts.push_back(plan::layout_to_string(plan::stages(other)));
        }
        if (std::find(cuts.begin(), cuts.end(), own) == cuts.end())
            outside_.push_back({"layout", own, listed(cuts, [](const std::string& cut) { return cut; })});
    }

    // The root that has most of the plan's choices says which of them are outside. Roots with a capacity have variants
    // without.
    void choices() {
        std::vector<const char*> fewest(std::begin(root_fields), std::end(root_fields));
        const plan::Plan* nearest = nullptr;
        for (const plan::Plan& root : space_.roots(plan_.tp, plan_.cp, plan_.ep, plan_.etp, plan_.pp)) {
            std::vector<const char*> differ;
            const bool routed = root.capacity > 0.0 && plan_.capacity == 0.0;
            for (const char* field : root_fields) {
                const std::string name = field;
                if (routed && (name == "capacity" || name == "paged_stash")) continue;
                if (plan::field_text(root, name) != plan::field_text(plan_, name)) differ.push_back(field);
            }
            if (nearest != nullptr && differ.size() >= fewest.size()) continue;
            fewest = differ;
            nearest = &root;
        }
        for (const char* field : fewest)
            if (nearest == nullptr || !varied(field))
                add(field, nearest != nullptr ? plan::field_text(*nearest, field) : "");
    }

    // What candidates have as the request does.
    void fixed_fields() {
        for (const char* field :
             {"rank_order", "attention_precision", "head_precision", "memory_efficient_permutation"}) {
            const std::string text = plan::field_text(space_.base(), field);
            if (text != plan::field_text(plan_, field) && !varied(field)) add(field, text);
        }
    }

    const plan::Plan& plan_;
    const stack::Stack& stack_;
    const SearchSpace space_;
    std::vector<OutsideField> outside_;
};

} // namespace

std::vector<OutsideField> outside_of_space(const plan::Plan& plan, const stack::Stack& stack) {
    return Lookup(plan, stack).run();
}

} // namespace moe::search
