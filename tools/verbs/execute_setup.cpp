// What execute makes of its options before the first step: plan, data, training options and first weights.
#include "tools/verbs/execute_setup.hpp"

#include "engine/backends/backends.hpp"
#include "engine/train/huggingface.hpp"
#include "engine/train/initial_weights.hpp"
#include "engine/train/megatron_weights.hpp"
#include "engine/train/resume.hpp"
#include "engine/train/upcycle.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/own_balance.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace moe::tools {

namespace {

double number_of(const char* option, std::string_view text) {
    double value = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
        refuse("{} {}: not a number", option, text);
    return value;
}

// "PREFIX", or "WEIGHT PREFIX" as the command line joins them.
data::BlendEntry blend_entry(const std::string& text) {
    const std::size_t blank = text.find(' ');
    double weight = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), weight);
    if (blank == std::string::npos || error != std::errc() || end != text.data() + blank) return {text, 1.0};
    if (!std::isfinite(weight) || weight <= 0.0) refuse("--data {}: the weight must be above 0", text);
    return {text.substr(blank + 1), weight};
}

// Goes on from the newest checkpoint; false where there is none yet.
bool resume(const ExecuteOptions& options, train::Trainer& trainer, data::SampleData& data, Console& console) {
    std::vector<std::string> skipped;
    const std::unique_ptr<weights::StoredCheckpoint> found = weights::newest_checkpoint(options.checkpoint, skipped);
    for (const std::string& reason : skipped) console.warn("skipped: {}", reason);
    if (!found) {
        if (options.checkpoint != options.run_dir) weights::refuse_foreign_folder(options.checkpoint);
        console.note("{} holds no checkpoint: starting from step 0", options.checkpoint);
        return false;
    }
    const weights::RunState& state = found->state();
    const train::ResumedRun now{trainer.plan().model->config_json,
                                static_cast<std::uint64_t>(options.seed),
                                data.position(0),
                                trainer.rules().freeze,
                                trainer.rules().group_texts(),
                                options.ema,
                                trainer.plan().optimizer.muon,
                                trainer.plan().lora.on() ? plan::to_string(trainer.plan().lora) : "",
                                trainer.delays_scales()};
    for (const std::string& line : train::check_resume(found->path(), state, now, options.allow_change))
        console.warn("{}", line);
    trainer.restore(*found);
    if (!state.data.datasets.empty()) data.start(state.samples, state.data, train::same_order(state, now));
    console.note("Resumed from {}: step {}", found->path(), state.step);
    return true;
}

} // namespace

train::TrainOptions train_options(const ExecuteOptions& options) {
    train::TrainOptions result;
    result.steps = options.steps;
    result.lr = options.lr;
    result.schedule = train::learning_rate_named(options.lr_schedule);
    if (options.min_lr >= 0.0) {
        if (!(options.min_lr <= options.lr)) refuse("--min-lr {}: must be between 0 and --lr", options.min_lr);
        if (result.schedule == train::LearningRate::constant)
            refuse("--min-lr {}: --lr-schedule constant does not fall", options.min_lr);
        result.final_fraction = options.lr > 0.0 ? options.min_lr / options.lr : 0.0;
    }
    result.decay_steps = options.lr_decay_steps;
    if (result.decay_steps > 0 && result.schedule != train::LearningRate::wsd)
        refuse("--lr-decay-steps {}: --lr-schedule {} has none, wsd has", options.lr_decay_steps, options.lr_schedule);
    result.warmup = options.warmup;
    const std::size_t comma = options.betas.find(',');
    if (comma == std::string::npos) refuse("--betas {}: must be two numbers, for example 0.9,0.95", options.betas);
    result.beta1 = number_of("--betas", std::string_view(options.betas).substr(0, comma));
    result.beta2 = number_of("--betas", std::string_view(options.betas).substr(comma + 1));
    result.eps = options.eps;
    result.weight_decay = options.weight_decay;
    result.clip = options.grad_clip;
    result.qk_clip = {options.qk_clip, options.qk_clip_alpha};
    result.ema = options.ema;
    result.record_routing = options.record_routing;
    result.replay_routing = options.replay_routing;
    if (!options.record_routing.empty() && options.record_routing == options.replay_routing)
        refuse("--record-routing {}: is the folder of --replay-routing", options.record_routing);
    if (!options.rampup_batch_size.empty()) result.ramp = train::batch_ramp(options.rampup_batch_size);
    result.rules.freeze = options.freeze;
    for (const std::string& text : options.lr_groups) result.rules.groups.push_back(train::rate_group(text));
    if (options.seed < 0) refuse("--seed {}: must not be negative", options.seed);
    result.seed = static_cast<std::uint64_t>(options.seed);
    backends::backend_named(options.backend); // refused before any file is read
    result.backend = options.backend;
    result.hang_timeout = options.hang_timeout;
    train::check_options(result);
    if (options.log_interval < 1) refuse("--log-interval {}: must be 1 or more", options.log_interval);
    if (options.save_interval < 0) refuse("--save-interval {}: must be 0 or more", options.save_interval);
    if (options.keep_checkpoints < 0)
        refuse("--keep-checkpoints {}: must be 0 (all) or more", options.keep_checkpoints);
    if (options.checkpoint.empty() && options.keep_checkpoints > 0)
        refuse("--keep-checkpoints: needs --checkpoint DIR");
    if (options.checkpoint.empty() && (options.resume || options.save_interval > 0))
        refuse("{}: needs --checkpoint DIR", options.resume ? "--resume" : "--save-interval");
    if (options.eval_interval < 0) refuse("--eval-interval {}: must be 0 or more", options.eval_interval);
    if (options.eval_batches < 0) refuse("--eval-batches {}: must be 0 or more", options.eval_batches);
    if (options.valid_data.empty() && (options.eval_interval > 0 || options.eval_batches > 0))
        refuse("{}: needs --valid-data PREFIX", options.eval_interval > 0 ? "--eval-interval" : "--eval-batches");
    result.evaluates = !options.valid_data.empty();
    if (!options.allow_change.empty() && !options.resume) refuse("--allow-change: needs --resume");
    result.skip_bad = options.skip_bad_steps;
    result.spike = options.spike_norm;
    if (options.spike_norm != 0.0 && !(options.spike_norm > 1.0)) // NOLINT: 0 as it is typed
        refuse("--spike-norm {}: must be 0 (off) or above 1", options.spike_norm);
    if (options.back_after < 0) refuse("--back-after {}: must be 0 (never) or more", options.back_after);
    if (!options.skip_bad_steps && (options.spike_norm > 0.0 || options.back_after > 0))
        refuse("{}: needs --skip-bad-steps", options.spike_norm > 0.0 ? "--spike-norm" : "--back-after");
    if (options.back_after > 0 && !options.replay_routing.empty())
        refuse("--back-after: goes on with other data than --replay-routing {} was recorded with",
               options.replay_routing);
    if (options.back_after > 0 && options.save_interval == 0)
        refuse("--back-after: needs --checkpoint DIR and --save-interval N");
    return result;
}

data::SampleData open_data(const ExecuteOptions& options, const plan::Plan& plan) {
    if (options.shuffle != "on" && options.shuffle != "off") refuse("--shuffle {}: must be on or off", options.shuffle);
    std::vector<data::BlendEntry> blend;
    for (const std::string& text : options.data) blend.push_back(blend_entry(text));
    data::SampleData data(blend, plan.seq, plan.gbs, plan.model->vocab, options.shuffle == "on",
                          static_cast<std::uint64_t>(options.seed));
    if (data.has_loss_mask() && !plan.masks_documents())
        refuse("--data {}: has a loss mask, which needs a plan that keeps documents apart: make it by search --fix "
               "documents=mask",
               fmt::join(options.data, " "));
    return data;
}

plan::Plan with_lengths(plan::Plan plan, data::SampleData& data) {
    if (!plan.masks_documents() || !plan.lengths.empty()) return plan;
    model::DocumentLengths lengths;
    for (const auto& [length, documents] : data.document_lengths()) lengths.bins.push_back({length, documents});
    plan.lengths = model::to_string(model::merged(std::move(lengths), model::most_document_bins));
    return plan;
}

std::unique_ptr<data::InOrder> open_valid_data(const ExecuteOptions& options, const plan::Plan& plan) {
    if (options.valid_data.empty()) return nullptr;
    return std::make_unique<data::InOrder>(options.valid_data, plan.seq, plan.model->vocab);
}

void set_weights(const ExecuteOptions& options, train::Trainer& trainer, data::SampleData& data, Console& console) {
    if (options.resume && resume(options, trainer, data, console)) return;
    if (!options.from_torch_dist.empty()) {
        const train::LoadReport report = train::load_megatron_weights(trainer, options.from_torch_dist);
        console.note("{}: {}", options.from_torch_dist, counted(report.loaded, "parameter"));
        return;
    }
    if (options.init_from.empty()) return;
    if (options.upcycle && trainer.plan().lora.on())
        refuse("--upcycle: experts that begin alike are trained whole, without --lora {}",
               plan::to_string(trainer.plan().lora));
    if (options.upcycle) {
        const train::LoadReport report = train::upcycle_weights(trainer, options.init_from);
        console.note("{}: experts are made of the dense model's MLPs", options.init_from);
        if (const std::string left = train::describe(report); !left.empty())
            console.warn("{}: {}", options.init_from, left);
        return;
    }
    std::vector<std::string> skipped;
    const std::unique_ptr<weights::StoredCheckpoint> run = weights::newest_checkpoint(options.init_from, skipped);
    for (const std::string& reason : skipped) console.warn("skipped: {}", reason);
    const train::LoadReport report =
        run ? train::load_weights(trainer, *run) : train::load_weights(trainer, options.init_from);
    if (const std::string left = train::describe(report); !left.empty())
        console.warn("{}: {}", options.init_from, left);
}

namespace {

// The adapters that --lora, --lora-alpha and --lora-targets ask for, in place of the plan's.
void set_lora(const ExecuteOptions& options, plan::Plan& plan) {
    if (options.lora.empty()) {
        if (!options.lora_alpha.empty() || !options.lora_targets.empty())
            refuse("{}: needs --lora RANK", options.lora_alpha.empty() ? "--lora-targets" : "--lora-alpha");
        return;
    }
    plan::Lora lora = plan::lora_from_string(options.lora);
    if (!options.lora_alpha.empty()) lora.alpha = number_of("--lora-alpha", options.lora_alpha);
    if (!(lora.alpha > 0.0) && lora.on()) refuse("--lora-alpha {}: must be above 0", options.lora_alpha);
    std::string targets = options.lora_targets;
    std::replace(targets.begin(), targets.end(), ',', '+');
    if (!targets.empty()) lora.targets = plan::adapted::from_string(targets);
    plan.lora = lora;
}

} // namespace

plan::Plan plan_to_run(const ExecuteOptions& options, std::string& balance) {
    plan::Plan plan = plan::load_plan(options.plan);
    if (!options.balance.empty()) plan::set_field(plan, "balance", options.balance);
    if (!options.optimizer.empty()) plan::set_field(plan, "optimizer", options.optimizer);
    set_lora(options, plan);
    plan::OwnBalance own =
        plan::own_balance(plan, options.plan + ": model", {options.aux_loss.empty(), options.bias_update.empty()});
    plan.router = own.router;
    balance = std::move(own.said);
    if (!options.aux_loss.empty()) plan::set_field(plan, "aux_loss", options.aux_loss);
    if (!options.bias_update.empty()) plan::set_field(plan, "bias_update", options.bias_update);
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("{}: {}", options.plan, fault.message);
    return plan;
}

void check_checkpoints(const ExecuteOptions& options) {
    if (options.checkpoint.empty() || options.resume) return;
    if (const std::vector<std::int64_t> steps = weights::checkpoint_steps(options.checkpoint); !steps.empty())
        refuse("{}: holds a checkpoint of step {}: add --resume to go on from it, or choose another folder",
               options.checkpoint, steps.front());
}

} // namespace moe::tools
