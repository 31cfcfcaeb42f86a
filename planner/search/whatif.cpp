// Walks the choices of a plan one by one, and the product of those that trade memory for time.
#include "planner/search/whatif.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>

namespace moe::search {
namespace {

std::string fault_of(const plan::Plan& plan, const stack::Stack& stack) {
    const plan::PlanFault fault = plan::check_plan(plan);
    return fault ? fault.message : stack::check_stack(plan, stack).message;
}

// The sound ones of the even and the balanced cut where pp or vpp is new; else the plan itself.
std::vector<plan::Plan> cuts_of(const plan::Plan& base, plan::Plan plan, const stack::Stack& stack) {
    if (plan.pp * plan.vpp == base.pp * base.vpp && plan.schedule == base.schedule)
        return stack::sound(plan, stack) ? std::vector<plan::Plan>{plan} : std::vector<plan::Plan>{};
    return stack::sound_cuts(std::move(plan), stack);
}

using Values = std::vector<std::string>;

// Sets one member away; from "full", which stands for all modules, the stack's other sets.
Values recompute_values(const plan::Plan& plan, const stack::Stack& stack) {
    Values values;
    if (plan.recompute == plan::recompute::full) {
        for (const unsigned set : stack.recompute_sets) values.push_back(plan::recompute::to_string(set));
        return values;
    }
    for (unsigned bit = 1; bit < plan::recompute::full; bit *= 2)
        values.push_back(plan::recompute::to_string(plan.recompute ^ bit));
    values.push_back(plan::recompute::to_string(plan::recompute::full));
    return values;
}

// Sets one module away: what is there can stay, and the stack may offer more.
std::vector<unsigned> offload_sets(const plan::Plan& plan, const stack::Stack& stack) {
    std::vector<unsigned> sets;
    for (unsigned bit = 1; bit <= plan::offload::optimizer; bit *= 2)
        if (stack.offloads || (plan.offload & bit) != 0) sets.push_back(plan.offload ^ bit);
    return sets;
}

Values offload_values(const plan::Plan& plan, const stack::Stack& stack) {
    Values values;
    for (const unsigned set : offload_sets(plan, stack)) values.push_back(plan::offload::to_string(set));
    return values;
}

template <class T>
Values words(const std::vector<T>& list) {
    Values values;
    for (const T value : list) values.emplace_back(to_string(value));
    return values;
}

// The fields that are no degrees, with the values to try. check_stack() says which of them the stack offers.
std::vector<std::pair<std::string, Values>> choice_values(const plan::Plan& plan, const stack::Stack& stack) {
    const Values on_off{"on", "off"};
    // Emulated precisions are for curves: none is proposed.
    std::vector<machine::Precision> own = stack.precisions;
    own.erase(std::remove_if(own.begin(), own.end(), [&](machine::Precision p) { return plan.emulates(p); }),
              own.end());
    const Values precisions = words(own);
    Values by_module = precisions;
    by_module.emplace_back("default");
    Values schedules{"1f1b", "interleaved"};
    for (const plan::ScheduleKind kind : stack.split_schedules) schedules.emplace_back(plan::to_string(kind));
    return {{"schedule", schedules},
            {"rank_order", {"tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"}},
            {"precision", precisions},
            {"attention_precision", by_module},
            {"expert_precision", by_module},
            {"head_precision", by_module},
            {"fp8_scaling", {"current", "delayed"}},
            {"fp8_wgrad", on_off},
            {"gradients", {"fp32", "bf16"}},
            {"recompute", recompute_values(plan, stack)},
            {"offload", offload_values(plan, stack)},
            {"optimizer", {"adamw", "adamw+bf16_moments"}},
            {"fsdp", on_off},
            {"dispatcher", words(stack.dispatchers)},
            {"cp_comm", {"ring", "alltoall", "alltoall+ring"}},
            {"capacity", {"none", "1", "1.25", "1.5", "2"}},
            {"tp_overlap", on_off},
            {"ep_overlap", on_off},
            {"delay_wgrad", on_off},
            {"cuda_graph", words(stack.cuda_graphs)}};
}

using Degree = int plan::Plan::*;

// `moved` goes to `value` and `taker` takes up the difference; nothing when it cannot.
std::optional<plan::Plan> trade(plan::Plan plan, Degree moved, int value, Degree taker) {
    const std::int64_t both = std::int64_t{plan.*moved} * (plan.*taker);
    if (both % value != 0) return std::nullopt;
    plan.*moved = value;
    plan.*taker = static_cast<int>(both / value);
    return plan;
}

// The fitting and fastest one of several ways to make one change.
std::optional<std::pair<plan::Plan, Estimate>> best_of(const std::vector<plan::Plan>& ways, Estimator& estimator,
                                                       std::string& refused) {
    std::optional<std::pair<plan::Plan, Estimate>> best;
    for (const plan::Plan& plan : ways) {
        try {
            const Estimate e = estimator.play(plan);
            const bool better = !best || e.fits > best->second.fits ||
                                (e.fits == best->second.fits && e.step_seconds < best->second.step_seconds);
            if (better) best = {plan, e};
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
            refused = error.what();
        }
    }
    return best;
}

class Neighbourhood {
public:
    Neighbourhood(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator)
        : base_(plan), stack_(stack), estimator_(estimator), now_(estimator.play(plan)) {}

    std::vector<WhatIf> all() {
        degree("tp", &plan::Plan::tp, {{&plan::Plan::dp}, {&plan::Plan::cp}});
        degree("cp", &plan::Plan::cp, {{&plan::Plan::dp}, {&plan::Plan::tp}});
        degree("pp", &plan::Plan::pp, {{&plan::Plan::dp, &plan::Plan::edp}, {&plan::Plan::dp, &plan::Plan::ep}});
        degree("ep", &plan::Plan::ep, {{&plan::Plan::edp}, {&plan::Plan::etp}});
        degree("etp", &plan::Plan::etp, {{&plan::Plan::edp}, {&plan::Plan::ep}});
        chunks();
        micro_batches();
        choices();
        std::stable_sort(found_.begin(), found_.end(), [](const WhatIf& a, const WhatIf& b) {
            const auto rank = [](const WhatIf& w) { return w.impossible.empty() ? (w.estimate.fits ? 0 : 1) : 2; };
            return rank(a) != rank(b) ? rank(a) < rank(b) : a.gain > b.gain;
        });
        return std::move(found_);
    }

private:
    // The first way that is sound wins, so that what moves along is the same axis wherever it can be.
    std::vector<plan::Plan> ways(Degree moved, int value, const std::vector<std::vector<Degree>>& takers,
                                 std::string& reason) const {
        for (const std::vector<Degree>& together : takers) {
            plan::Plan plan = base_;
            bool possible = true;
            for (const Degree taker : together) {
                plan::Plan start = plan;
                start.*moved = base_.*moved;
                const std::optional<plan::Plan> next = trade(start, moved, value, taker);
                possible = possible && next.has_value();
                if (next) plan = *next;
            }
            if (!possible) continue;
            follow_schedule(plan);
            std::vector<plan::Plan> cuts = cuts_of(base_, plan, stack_);
            if (cuts.empty() && plan.pp != base_.pp) cuts = rechunked(plan);
            if (!cuts.empty()) return cuts;
            if (reason.empty()) reason = fault_of(plan, stack_);
        }
        return {};
    }

    // Another number of stages may need another number of chunks: overlap of EP several, many stages few.
    std::vector<plan::Plan> rechunked(plan::Plan plan) const {
        for (const int vpp : {1, 2, 4}) {
            plan.vpp = vpp;
            follow_schedule(plan);
            std::vector<plan::Plan> cuts = cuts_of(base_, plan, stack_);
            if (!cuts.empty()) return cuts;
        }
        return {};
    }

    // Interleaving needs several stages and several chunks.
    void follow_schedule(plan::Plan& plan) const {
        if (plan.pp == 1) plan.vpp = 1;
        const bool chunked = plan.vpp > 1;
        if (plan.schedule == plan::ScheduleKind::interleaved && !chunked)
            plan.schedule = plan::ScheduleKind::one_f_one_b;
        if (plan.schedule == plan::ScheduleKind::one_f_one_b && chunked)
            plan.schedule = plan::ScheduleKind::interleaved;
    }

    // Above and below, the nearest value that gives a sound plan; the nearest reason where there is none.
    void degree(const char* field, Degree moved, const std::vector<std::vector<Degree>>& takers) {
        std::vector<int> values;
        for (int v = 1; v <= base_.gpus; ++v)
            if (base_.gpus % v == 0) values.push_back(v);
        const auto here = std::lower_bound(values.begin(), values.end(), base_.*moved) - values.begin();
        for (const int step : {1, -1}) {
            std::string reason;
            int nearest = 0;
            bool found = false;
            for (auto i = here + step; i >= 0 && i < static_cast<std::ptrdiff_t>(values.size()) && !found; i += step) {
                const int value = values[static_cast<std::size_t>(i)];
                std::string why;
                const std::vector<plan::Plan> plans = ways(moved, value, takers, why);
                found = !plans.empty();
                if (found) price(field, plans);
                if (reason.empty() && !why.empty()) reason = why, nearest = value;
            }
            if (!found && !reason.empty()) reject(field, std::to_string(nearest), reason);
        }
    }

    void chunks() {
        if (base_.pp == 1) return;
        const int most = static_cast<int>(base_.model->layers.size()) + 2; // Embedding and loss may lie alone.
        for (const int step : {1, -1}) {
            bool found = false;
            for (int v = base_.vpp + step; v >= 1 && v * base_.pp <= most + base_.pp && !found; v += step) {
                plan::Plan plan = base_;
                plan.vpp = v;
                follow_schedule(plan);
                const std::vector<plan::Plan> plans = cuts_of(base_, plan, stack_);
                found = !plans.empty();
                if (found) price("vpp", plans);
            }
        }
    }

    void micro_batches() {
        const std::int64_t per_rank = base_.gbs / base_.dp;
        for (const int step : {1, -1}) {
            bool found = false;
            for (std::int64_t v = base_.mbs + step; v >= 1 && v <= per_rank && !found; v += step) {
                plan::Plan plan = base_;
                plan.mbs = v;
                found = per_rank % v == 0 && stack::sound(plan, stack_);
                if (found) price("mbs", {plan});
            }
        }
    }

    // Everything that is not a degree: values as set_field() reads them.
    void choices() {
        for (const auto& [field, values] : choice_values(base_, stack_))
            for (const std::string& value : values) choose(field, value);
    }

    void choose(const std::string& field, const std::string& value) {
        plan::Plan plan = base_;
        try {
            plan::set_field(plan, field, value);
        } catch (const Error&) {
            return;
        }
        if (plan::field_text(plan, field) == plan::field_text(base_, field)) return;
        std::vector<plan::Plan> plans = cuts_of(base_, plan, stack_);
        if (plans.empty() && field == "schedule") { // The schedules differ in the chunks that they need.
            for (const int vpp : {1, 2}) {
                plan.vpp = vpp;
                plans = cuts_of(base_, plan, stack_);
                if (!plans.empty()) break;
            }
        }
        if (!plans.empty()) price(field, plans);
    }

    void price(const std::string& field, const std::vector<plan::Plan>& plans) {
        std::string refused;
        const auto best = best_of(plans, estimator_, refused);
        if (!best) return reject(field, plan::field_text(plans.front(), field), refused);
        WhatIf w;
        w.plan = best->first;
        w.estimate = best->second;
        // A choice that this plan has no use for, such as a dispatcher without expert parallelism.
        if (w.estimate.step_seconds == now_.step_seconds && w.estimate.memory_bytes == now_.memory_bytes) return;
        for (const WhatIf& other : found_) // One plan may have two names: more chunks, and the schedule that has them.
            if (other.impossible.empty() && plan::differences(other.plan, w.plan).empty()) return;
        w.gain = now_.tflops_per_gpu > 0.0 ? w.estimate.tflops_per_gpu / now_.tflops_per_gpu - 1.0 : 0.0;
        for (plan::FieldChange& change : plan::differences(base_, w.plan))
            if (change.field == field)
                w.change = std::move(change);
            else
                w.along.push_back(std::move(change));
        found_.push_back(std::move(w));
    }

    void reject(const std::string& field, const std::string& to, const std::string& reason) {
        WhatIf w;
        w.change = {field, plan::field_text(base_, field), to};
        w.plan = base_;
        w.impossible = reason;
        found_.push_back(std::move(w));
    }

    const plan::Plan& base_;
    const stack::Stack& stack_;
    Estimator& estimator_;
    Estimate now_;
    std::vector<WhatIf> found_;
};

// Every combination that trades memory for time within the plan's mapping.
std::vector<plan::Plan> front_candidates(const plan::Plan& base, const stack::Stack& stack) {
    std::vector<unsigned> sets = stack.recompute_sets;
    if (std::find(sets.begin(), sets.end(), base.recompute) == sets.end()) sets.push_back(base.recompute);
    std::vector<plan::Plan> plans{base};
    const auto multiply = [&plans](const auto& values, const auto& assign) {
        std::vector<plan::Plan> all;
        for (const plan::Plan& plan : plans)
            for (const auto& value : values) {
                all.push_back(plan);
                assign(all.back(), value);
            }
        plans = std::move(all);
    };
    std::vector<std::int64_t> sizes;
    const std::int64_t per_rank = base.gbs / base.dp;
    for (std::int64_t v = 1; v <= std::min(per_rank, 4 * base.mbs); ++v)
        if (per_rank % v == 0 && 4 * v >= base.mbs) sizes.push_back(v);
    const std::vector<bool> both{false, true};
    multiply(sets, [](plan::Plan& plan, unsigned set) { plan.recompute = set; });
    multiply(sizes, [](plan::Plan& plan, std::int64_t size) { plan.mbs = size; });
    // Offload of activations multiplies the segments to price: it is tried with the plan's own recomputation and
    // micro-batch only.
    for (const plan::Plan& plan : std::vector<plan::Plan>(plans)) {
        if (plan.mbs != base.mbs) continue;
        for (const unsigned set : offload_sets(plan, stack)) {
            if ((set ^ plan.offload) != plan::offload::optimizer && plan.recompute != base.recompute) continue;
            plans.push_back(plan);
            plans.back().offload = set;
        }
    }
    multiply(both, [](plan::Plan& plan, bool on) {
        plan.optimizer.moments = on ? plan::Moments::bf16 : plan::Moments::fp32;
    });
    multiply(both, [](plan::Plan& plan, bool on) { plan.fsdp = on; });
    plans.erase(
        std::remove_if(plans.begin(), plans.end(), [&](const plan::Plan& plan) { return !stack::sound(plan, stack); }),
        plans.end());
    return plans;
}

// The points that no other one beats in both memory and step time; ascending in memory.
std::vector<FrontPoint> unbeaten(std::vector<FrontPoint> points) {
    std::stable_sort(points.begin(), points.end(), [](const FrontPoint& a, const FrontPoint& b) {
        const Estimate &x = a.estimate, &y = b.estimate;
        if (x.memory_bytes != y.memory_bytes) return x.memory_bytes < y.memory_bytes;
        return x.step_seconds != y.step_seconds ? x.step_seconds < y.step_seconds : a.changes.size() < b.changes.size();
    });
    std::vector<FrontPoint> front;
    for (FrontPoint& point : points)
        if (front.empty() || point.estimate.step_seconds < front.back().estimate.step_seconds)
            front.push_back(std::move(point));
    return front;
}

} // namespace

std::vector<WhatIf> what_ifs(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator) {
    return Neighbourhood(plan, stack, estimator).all();
}

std::vector<FrontPoint> memory_front(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator) {
    std::vector<FrontPoint> points;
    for (plan::Plan& candidate : front_candidates(plan, stack)) {
        try {
            const Estimate estimate = estimator.estimate(candidate);
            std::vector<plan::FieldChange> changes = plan::differences(plan, candidate);
            points.push_back({std::move(changes), std::move(candidate), estimate});
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
        }
    }
    std::vector<FrontPoint> front = unbeaten(std::move(points));
    for (FrontPoint& point : front) point.estimate = estimator.play(point.plan);
    return unbeaten(std::move(front));
}

} // namespace moe::search
