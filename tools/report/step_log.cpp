// A line and a record for every step.
#include "tools/report/step_log.hpp"

#include "planner/base/counted.hpp"
#include "planner/model/model.hpp"
#include "tools/print/table.hpp"

#include <algorithm>
#include <numeric>

namespace moe::tools {

namespace {

double median(std::vector<double> values) {
    if (values.empty()) return 0.0;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

} // namespace

StepLog::StepLog(Console& console, const plan::Plan& plan, LogSteps steps, RunRecord& run)
    : console_(console),
      steps_(steps),
      run_(run),
      flops_per_token_(plan::flops_per_token(plan)),
      plan_(plan),
      gpus_(plan.gpus),
      routers_(*plan.model, plan.router.aux_loss) {}

RouterRecord StepLog::router_record(const train::RouterStep& router, std::int64_t tokens) const {
    RouterRecord record{
        router.layer, router.aux_loss, router.z_loss, router.max_over_mean(), router.load_entropy(), {}, {}};
    if (!router.bias.empty()) record.bias_spread = router.bias_spread();
    if (plan_.router.expert_capacity > 0.0) {
        const model::Model& model = *plan_.model;
        const auto mtp = static_cast<std::size_t>(
            std::max<std::ptrdiff_t>(0, router.layer - static_cast<std::ptrdiff_t>(model.layers.size())));
        const bool behind = router.layer >= static_cast<int>(model.layers.size());
        const int kind = behind ? model.mtp[mtp] : model.layers[static_cast<std::size_t>(router.layer)];
        const auto chosen = static_cast<double>(tokens) * model.kinds[static_cast<std::size_t>(kind)].moe.value().top_k;
        const auto sent =
            static_cast<double>(std::accumulate(router.tokens.begin(), router.tokens.end(), std::int64_t{0}));
        record.dropped = 1.0 - sent / chosen;
    }
    return record;
}

void StepLog::add(const train::StepResult& step) {
    const double rate = static_cast<double>(step.tokens) / step.seconds;
    const double tflops = flops_per_token_ * rate / gpus_ / 1e12;
    run_.steps.push_back({step.step,
                          step.loss,
                          step.mtp_loss,
                          step.grad_norm,
                          step.lr,
                          step.seconds,
                          tflops,
                          step.tokens,
                          step.overflow,
                          {},
                          {},
                          step.skipped});
    if (step.logits) {
        run_.steps.back().max_logit = step.logits->largest;
        run_.steps.back().clipped_heads = step.logits->clipped;
    }
    double worst = 1.0;
    for (const train::RouterStep& router : step.routers) {
        worst = std::max(worst, router.max_over_mean());
        run_.steps.back().routers.push_back(router_record(router, step.tokens));
    }
    for (const train::IndexerStep& indexer : step.indexers)
        run_.steps.back().indexers.push_back({indexer.layer, indexer.loss});
    for (const std::string& line : routers_.add(step)) console_.warn("{}", line);
    std::string routers;
    if (!step.routers.empty()) {
        if (console_.verbose()) routers = fmt::format(" | aux loss {:.3g}", step.aux_loss());
        routers += fmt::format(" | hottest {:.2f}x", worst);
    }
    if (const std::optional<double> loss = run_.steps.back().indexer_loss())
        routers += fmt::format(" | indexer loss {:.3g}", *loss);
    std::string logits;
    if (step.logits) logits = fmt::format(" | max logit {:.1f}", step.logits->largest);
    if (step.logits && step.logits->clipped > 0) logits += fmt::format(", clipped heads {}", step.logits->clipped);
    if (step.overflow > 0.0)
        console_.note("step {}/{}: {:.0f} routed rows too many for the planned capacity: the step was run again",
                      step.step, steps_.steps, step.overflow);
    if (step.skipped)
        console_.warn("step {}/{}: the gradients' norm is {:.3g}: a bad step, no weight has changed", step.step,
                      steps_.steps, step.grad_norm);
    // The first step touches all memory for the first time.
    if (run_.steps.size() > 1) seconds_.push_back(step.seconds);
    run_.measured_step_seconds = seconds_.empty() ? step.seconds : median(seconds_);
    const bool shown = run_.steps.size() == 1 || step.step == steps_.steps || step.step % steps_.interval == 0;
    const std::string head = fmt::format("step {}/{} | loss {:.4f} | norm {:.3f} | lr {:.1e}{}{}", step.step,
                                         steps_.steps, step.loss, step.grad_norm, step.lr, logits, routers);
    if (shown && !console_.verbose()) console_.note("{} | {}", head, seconds_text(step.seconds));
    if (shown && console_.verbose())
        console_.note("{} | {} tokens/s | {:.3g} TFLOPS/GPU | {}, predicted {} (predicted/measured {:.2f})", head,
                      count_text(rate), tflops, seconds_text(step.seconds), seconds_text(run_.predicted_step_seconds),
                      run_.predicted_step_seconds / run_.measured_step_seconds);
    console_.progress(fmt::format("{}/{} steps, {:.0f} s left", step.step, steps_.steps,
                                  static_cast<double>(steps_.steps - step.step) * run_.measured_step_seconds));
}

void StepLog::add(const train::Evaluation& evaluation, double seconds) {
    const std::int64_t step = run_.steps.back().step;
    run_.steps.back().valid_loss = evaluation.loss;
    run_.evaluations.push_back({step, evaluation.loss, evaluation.tokens});
    console_.note("step {}/{} | valid loss {:.4f} over {} | {}", step, steps_.steps, evaluation.loss,
                  counted(evaluation.tokens, "token"), seconds_text(seconds));
}

} // namespace moe::tools
