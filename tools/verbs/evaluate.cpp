// The verb evaluate: the mean loss of a model's weights over a dataset.
#include "engine/data/in_order.hpp"
#include "engine/train/data_source.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/weights.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace moe::tools {
namespace {

constexpr std::int64_t usual_seq = 1024;

plan::Plan plan_of(const EvaluateOptions& options, const UsedWeights& weights) {
    if (options.plan.empty()) {
        if (options.batch < 1) refuse("--batch {}: must be 1 or more", options.batch);
        const std::int64_t seq = options.seq > 0 ? options.seq : std::min(usual_seq, weights.positions(usual_seq));
        return weights.plan(seq, options.batch);
    }
    plan::Plan plan = plan::load_plan(options.plan);
    if (!options.precision.empty()) refuse("--precision {}: the plan has one of its own", options.precision);
    if (options.seq > 0) plan.seq = options.seq;
    if (plan.model->architecture != weights.model()->architecture)
        refuse("{}: is of {}, the weights are of {}", options.plan, plan.model->architecture,
               weights.model()->architecture);
    if (const plan::PlanFault fault = stack::check_stack(plan, stack::load_stack("moe-plan", *plan.hardware)))
        refuse("{}: the engine cannot run it: {}", options.plan, fault.message);
    return plan;
}

} // namespace

void evaluate_verb(const EvaluateOptions& options) {
    if (options.seq < 0) refuse("--seq {}: must be 1 or more", options.seq);
    if (options.batches < 0) refuse("--batches {}: must be 1 or more", options.batches);
    const UsedWeights weights(options);
    const plan::Plan plan = plan_of(options, weights);
    data::InOrder data(options.data, plan.seq, plan.model->vocab);
    Console console(options);
    const std::unique_ptr<train::Trainer> ranks = weights.ranks(plan, {true, 0}, console);
    std::int64_t samples = data.samples();
    if (options.batches > 0) samples = std::min(samples, options.batches * plan.gbs);
    const auto begin = std::chrono::steady_clock::now();
    const train::Evaluation result = ranks->evaluate(train::samples_of(data), samples);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (options.json) return print(evaluate_document({0, result.loss, result.tokens}, plan.seq));
    console.say("Loss {:.4f} nats/token, perplexity {:.4f}, over {} in sequences of {}", result.loss,
                std::exp(result.loss), counted(result.tokens, "token"), counted(plan.seq));
    console.note("{}: {}, {}", plan.model->name, counted(plan.gpus, "rank"), seconds_text(seconds));
}

} // namespace moe::tools
