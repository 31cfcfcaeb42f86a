// The verb explain: the walls of a plan, what each single change would do, and what makes it differ from another plan.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/search/feasibility.hpp"
#include "planner/search/refined_search.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/correction.hpp"
#include "tools/report/explanation.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

std::string signed_percent(double fraction) { return fmt::format("{:+.1f}%", fraction * 100.0); }
std::string tflops_text(double tflops) { return fmt::format("{:.4g}", tflops); }

std::string along_text(const std::vector<plan::FieldChange>& changes) {
    std::string text;
    for (const plan::FieldChange& c : changes)
        text += fmt::format("{}{} {} -> {}", text.empty() ? "" : ", ", c.field, c.from, c.to);
    return text;
}

// The choices that are not at their default.
std::string choices_text(const plan::Plan& plan) {
    std::string text;
    for (const std::string& field : plan::field_names())
        if (plan::field_text(plan, field) != plan::field_text(plan::Plan{}, field))
            text += fmt::format("{}{} {}", text.empty() ? "" : ", ", field, plan::field_text(plan, field));
    return text;
}

void print_memory(Console& console, const Explanation& e) {
    const replay::Walls& w = e.walls;
    const double left = w.memory_limit - w.memory_bytes;
    console.say("\nMemory wall: {} of {} GiB on stage {}, {} GiB {}", gib_text(w.memory_bytes),
                gib_text(w.memory_limit), w.fullest, gib_text(std::abs(left)), left >= 0.0 ? "free" : "TOO MUCH");
    Table table({"<", "GiB", "share"});
    for (const auto& [name, bytes] : w.memory) table.add({name, gib_text(bytes), percent_text(bytes / w.memory_bytes)});
    console.table(table, 2);
}

void print_communication(Console& console, const Explanation& e) {
    const double step = e.simulation.estimate.step_seconds;
    double exposed = 0.0;
    for (const replay::CommunicationWall& c : e.walls.communication) exposed += c.exposed;
    console.say("\nCommunication wall: {} of the step exposed ({}), on stage {}", seconds_text(exposed),
                percent_text(exposed / step), e.walls.stage);
    if (e.walls.communication.empty()) return;
    Table table({"<", "busy", "exposed", {"hidden", 1}, {"GB", 2}, {"GB/s", 3}, {"ops", 4}});
    for (const replay::CommunicationWall& c : e.walls.communication)
        table.add({c.axis, seconds_text(c.busy), seconds_text(c.exposed),
                   c.busy > 0.0 ? percent_text(std::max(0.0, 1.0 - c.exposed / c.busy)) : "-",
                   fmt::format("{:.1f}", c.bytes / 1e9), c.busy > 0.0 ? tflops_text(c.bytes / c.busy / 1e9) : "-",
                   count_text(static_cast<double>(c.ops))});
    console.table(table, 2);
    if (e.walls.reserving > 0)
        console.say("  {} products leave {} of {} multiprocessors to tokens on their way beside them",
                    count_text(static_cast<double>(e.walls.reserving)), e.walls.reserved_sms,
                    e.plan.hardware->sm_count);
}

void print_compute(Console& console, const Explanation& e) {
    const replay::Walls& w = e.walls;
    const search::Estimate& estimate = e.simulation.estimate;
    console.say("\nCompute and host wall: the model's FLOPs take {} at {} peak, {} of the step (MFU)",
                seconds_text(w.model_seconds), machine::to_string(e.plan.computed_in(e.plan.precision)),
                percent_text(w.model_seconds / estimate.step_seconds));
    Table table({"<", "busy", {"at peak", 2}, "of peak", {"recompute", 1}, {"ops", 3}});
    for (const replay::ComputeWall& c : w.compute)
        table.add({c.name, seconds_text(c.busy), seconds_text(c.ideal), percent_text(c.ideal / std::max(c.busy, 1e-30)),
                   c.repeated > 0.0 ? seconds_text(c.repeated) : "-", count_text(static_cast<double>(c.ops))});
    console.table(table, 2);
    console.say("  host: {} to issue {}, {} of the step exposed", seconds_text(w.issue_seconds),
                counted(w.launches, "op"), seconds_text(estimate.breakdown.host));
    if (w.unaligned > 0)
        console.say("  {} products have rows that are not whole 16 bytes (of {} elements): {} lost; widths that are "
                    "multiples of 8 on every rank avoid it",
                    count_text(static_cast<double>(w.unaligned)), w.unaligned_width, seconds_text(w.unaligned_seconds));
    const auto lost = losses(e);
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(4, lost.size()); ++i)
        text += fmt::format("{}{} {} ({})", i > 0 ? ", " : "", lost[i].first, seconds_text(lost[i].second),
                            percent_text(lost[i].second / estimate.step_seconds));
    if (!text.empty()) console.say("\nMost time is lost to: {}", text);
}

void print_deltas(Console& console, const Explanation& e) {
    console.say("\nEach single change, by the fast estimate (this plan: {} TFLOPS/GPU, {} GiB):",
                tflops_text(e.base.tflops_per_gpu), gib_text(e.base.memory_bytes));
    Table table({"<change", "<", {"TFLOPS/GPU", 1}, "gain", "sure", {"step", 3}, "GiB", {"more GiB", 2}, "<also"});
    for (std::size_t i = 0; i < e.deltas.size(); ++i) {
        const search::WhatIf& w = e.deltas[i];
        if (!w.impossible.empty()) continue;
        table.add({w.change.field, fmt::format("{} -> {}", w.change.from, w.change.to),
                   tflops_text(w.estimate.tflops_per_gpu), signed_percent(w.gain),
                   e.certainties[i] ? fmt::format("{:.0f}%", 100.0 * *e.certainties[i]) : "-",
                   seconds_text(w.estimate.step_seconds),
                   gib_text(w.estimate.memory_bytes) + (w.estimate.fits ? "" : "!"),
                   signed_gib_text(w.estimate.memory_bytes - e.base.memory_bytes), along_text(w.along)});
    }
    console.table(table, 2);
    if (std::any_of(e.certainties.begin(), e.certainties.end(), [](const auto& c) { return c.has_value(); }))
        console.say("  (sure: probability that the sign of the gain is right, by pairs of published runs)");
    if (std::any_of(e.deltas.begin(), e.deltas.end(),
                    [](const search::WhatIf& w) { return w.impossible.empty() && !w.estimate.fits; }))
        console.say("  (! does not fit)");
    for (const search::WhatIf& w : e.deltas)
        if (!w.impossible.empty())
            console.say("  {} {} -> {}: {}", w.change.field, w.change.from, w.change.to, w.impossible);
}

void print_front(Console& console, const Explanation& e) {
    console.say("\nMemory against time, same mapping (every plan here is beaten by none in both):");
    Table table({"GiB", "step", "TFLOPS/GPU", "<changes"});
    for (const search::FrontPoint& p : e.front)
        table.add({gib_text(p.estimate.memory_bytes) + (p.estimate.fits ? "" : "!"),
                   seconds_text(p.estimate.step_seconds), tflops_text(p.estimate.tflops_per_gpu),
                   p.changes.empty() ? "(this plan)" : along_text(p.changes)});
    console.table(table, 2);
}

// The remedy for a plan that does not fit: the fitting change that costs least, alone or together.
void print_remedy(Console& console, const Explanation& e) {
    if (e.base.fits) return;
    const double over = e.base.memory_bytes - e.plan.hardware->memory_bytes;
    console.say("\nThis plan does not fit: {} GiB too much.", gib_text(over));
    const auto single = std::find_if(e.deltas.begin(), e.deltas.end(),
                                     [](const search::WhatIf& w) { return w.impossible.empty() && w.estimate.fits; });
    const search::FrontPoint* fastest = nullptr;
    for (const search::FrontPoint& p : e.front)
        if (p.estimate.fits) fastest = &p;
    if (single != e.deltas.end())
        console.say("  Smallest change that fits: {} {} -> {} ({} TFLOPS/GPU, {} GiB)", single->change.field,
                    single->change.from, single->change.to, tflops_text(single->estimate.tflops_per_gpu),
                    gib_text(single->estimate.memory_bytes));
    else if (fastest == nullptr)
        console.say("  No single change and no choice within this mapping fits: search again with more GPUs, or a "
                    "shorter sequence");
    if (fastest != nullptr)
        console.say("  Fastest within this mapping: {} ({} TFLOPS/GPU, {} GiB)", along_text(fastest->changes),
                    tflops_text(fastest->estimate.tflops_per_gpu), gib_text(fastest->estimate.memory_bytes));
}

void print_differences(Console& console, const char* title, const std::vector<Difference>& list,
                       std::string (*text)(double)) {
    Table table({std::string("<") + title, "this plan", "other", "difference"});
    for (const Difference& d : list)
        if (d.here > 0.0 || d.there > 0.0)
            table.add({d.name, text(d.here), text(d.there),
                       fmt::format("{}{}", d.there < d.here ? "" : "+", text(d.there - d.here))});
    console.line("");
    console.table(table, 2);
}

void print_versus(Console& console, const Explanation& e, const Versus& v) {
    const search::Estimate& here = e.simulation.estimate;
    console.say("\nThe other plan: {} TFLOPS/GPU ({}), step {}, {} GiB; it differs in {}",
                tflops_text(v.there.tflops_per_gpu), signed_percent(v.there.tflops_per_gpu / here.tflops_per_gpu - 1.0),
                seconds_text(v.there.step_seconds), gib_text(v.there.memory_bytes),
                v.fields.empty() ? "nothing" : along_text(v.fields));
    print_differences(console, "step of the slowest rank", v.parts, seconds_text);
    print_differences(console, "busy by op kind", v.kinds, seconds_text);
    print_differences(console, "GiB of the fullest rank", v.memory, gib_text);
}

void print_infeasible(Console& console, const Request& request, const search::Infeasibility& why) {
    const plan::Plan& base = request.search.base;
    console.say("{} on {} x {}, stack {}: no plan\n", base.model->name, base.gpus, base.hardware->name, base.stack);
    Table constraints({"<constraint", "candidates", "<for example"});
    for (const search::Obstacle& o : why.obstacles)
        constraints.add({o.constraint, count_text(static_cast<double>(o.candidates)), o.example});
    if (!why.obstacles.empty()) console.table(constraints);
    if (!why.closest.empty()) {
        console.say(
            "\nMappings that need least (GiB of {}), with their deepest recomputation and\nsmallest micro-batch:",
            gib_text(base.hardware->memory_bytes));
        Table table({"GiB", "TP", "CP", "DP", "PP", "EP", "ETP", "MBS", "<recompute"});
        for (const search::TightConfig& m : why.closest)
            table.add({gib_text(m.memory_bytes), fmt::format("{}", m.plan.tp), fmt::format("{}", m.plan.cp),
                       fmt::format("{}", m.plan.dp), fmt::format("{}", m.plan.pp), fmt::format("{}", m.plan.ep),
                       fmt::format("{}", m.plan.etp), fmt::format("{}", m.plan.mbs),
                       plan::recompute::to_string(m.plan.recompute)});
        console.table(table, 2);
    }
    if (why.remedies.empty()) return console.say("\nNo single change of the request that was tried gives a plan.");
    Table table({"<change alone that gives a plan", "<", "GiB", "<plan that fits"});
    for (const search::Remedy& r : why.remedies)
        table.add(
            {r.what, fmt::format("{} -> {}", r.from, r.to), gib_text(r.memory_bytes),
             fmt::format("tp {} cp {} dp {} pp {} ep {} etp {} mbs {} recompute {}", r.plan.tp, r.plan.cp, r.plan.dp,
                         r.plan.pp, r.plan.ep, r.plan.etp, r.plan.mbs, plan::recompute::to_string(r.plan.recompute))});
    console.line("");
    console.table(table);
}

// The hardware less the headroom that was asked for.
std::shared_ptr<const machine::Hardware> asked_headroom(const std::shared_ptr<const machine::Hardware>& hardware,
                                                        const SearchOptions& options) {
    return with_headroom(hardware, options.memory_headroom.value_or(0.0));
}

// The best plan of the request. Where there is none, prints why before it throws search's Error (no_plan).
plan::Plan plan_of(Request request, const ExplainOptions& options) {
    pricing::SkewedEstimator physics(request.search.base.hardware, request.stack, request.point);
    published::Corrector corrector(request.stack, !options.request.no_neighbours);
    published::CorrectedEstimator estimator(physics, corrector);
    settle_gpus(options.request, request, estimator);
    const search::SearchSpace sound(request.search, request.stack); // refuses fields that cannot be pinned as asked
    try {
        plan::Plan best = search::refined_search(request.search, request.stack, estimator).plans.front().first;
        best.hardware = asked_headroom(request.hardware, options.request); // the stack's own is search's alone
        return best;
    } catch (const Error& error) {
        if (error.fault() != Fault::no_plan) throw;
        const search::Infeasibility why = search::explain_request(request.search, request.stack, estimator);
        if (options.json) {
            print(infeasibility_document(why, error.what()));
        } else {
            Console console(options);
            print_infeasible(console, request, why);
        }
        throw;
    }
}

plan::Plan load_sound(const std::string& path, const SearchOptions& options) {
    plan::Plan plan = plan::load_plan(path);
    plan.hardware = asked_headroom(plan.hardware, options);
    const stack::Stack stack = stack_of_plan(plan, path);
    if (const plan::PlanFault fault = stack::check_stack(plan, stack)) refuse("{}: {}", path, fault.message);
    return plan;
}

Explanation explained(const plan::Plan& plan, const SearchOptions& options) {
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    published::Corrector corrector(stack, !options.no_neighbours);
    return explain_plan(plan, stack, replay::simulate(plan, stack), corrector, static_cast<int>(options.spare_experts));
}

} // namespace

void explain_verb(const ExplainOptions& options) {
    check_spare_experts(options.request.spare_experts);
    const bool asked = !options.request.model.empty() || !options.request.hardware.empty();
    if (options.plan.empty() == !asked)
        refuse("explain: give either PLAN or a request (--model, --hardware, --gpus, --gbs, --seq)");
    if (!options.request.more_gpus.empty())
        refuse("explain: --gpus {},{}: must be one number, or auto", options.request.gpus,
               fmt::join(options.request.more_gpus, ","));
    const plan::Plan plan =
        asked ? plan_of(request_of(options.request), options) : load_sound(options.plan, options.request);
    const Explanation here = explained(plan, options.request);
    Console console(options);
    if (asked) warn_left_out(console, *plan.model);
    Versus versus;
    if (!options.versus.empty())
        versus = compare_plans(here, explained(load_sound(options.versus, options.request), options.request));
    if (options.json) return print(explanation_document(here, options.versus.empty() ? nullptr : &versus));

    const search::Estimate& e = here.simulation.estimate;
    console.say("{} on {} x {}, stack {}: {} TFLOPS/GPU, step {}, {} GiB of {}{}", here.plan.model->name,
                here.plan.gpus, here.plan.hardware->name, here.plan.stack, tflops_text(e.tflops_per_gpu),
                seconds_text(e.step_seconds), gib_text(e.memory_bytes), gib_text(here.plan.hardware->memory_bytes),
                e.fits ? "" : " (does not fit)");
    console.line(interval_text(here.interval));
    if (here.correction) console.line(correction_text(&*here.correction));
    if (asked) console.say("The best plan of the request: {}", choices_text(here.plan));
    if (routing::skewed(here.plan)) console.say("\n{}", skew_text(here.plan, here.skew));
    print_remedy(console, here);
    if (options.quiet) return;
    print_memory(console, here);
    print_communication(console, here);
    print_compute(console, here);
    if (!options.versus.empty()) return print_versus(console, here, versus);
    print_deltas(console, here);
    print_front(console, here);
}

} // namespace moe::tools
