// The verb execute: trains with exactly the given plan and keeps what compare needs.
#include "engine/backends/backends.hpp"
#include "engine/base/crc32c.hpp"
#include "engine/data/data.hpp"
#include "engine/data/in_order.hpp"
#include "engine/train/data_source.hpp"
#include "engine/train/huggingface.hpp"
#include "engine/train/initial_weights.hpp"
#include "engine/train/resume.hpp"
#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/own_balance.hpp"
#include "simulator/replay/simulate.hpp"
#include "tools/history/metrics.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/report/exposed_comm.hpp"
#include "tools/report/perfetto.hpp"
#include "tools/report/step_log.hpp"
#include "tools/verbs/verbs.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>

namespace moe::tools {

namespace {

double number_of(const char* option, std::string_view text) {
    double value = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
        refuse("{} {}: not a number", option, text);
    return value;
}

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
    if (options.back_after > 0 && options.save_interval == 0)
        refuse("--back-after: needs --checkpoint DIR and --save-interval N");
    return result;
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

// The plan; where it masks documents and says no lengths, with those of the data, which FLOPs and prices follow.
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

// The ranks of this process: a plan that does not fit must be refused before the system kills the process.
void check_memory(const std::string& place, int ranks, const replay::Simulation& simulation) {
    const double mean = std::accumulate(simulation.memory_bytes.begin(), simulation.memory_bytes.end(), 0.0) /
                        static_cast<double>(simulation.memory_bytes.size());
    const double machine =
        static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
    if (mean * ranks > machine)
        refuse("{}: its {} ranks need {:.1f} GiB, this machine has {:.1f} GiB: use a smaller model, batch or sequence",
               place, ranks, gib(mean * ranks), gib(machine));
}

// The folder that --run-dir names. It starts without traces of an earlier run, so that what lies there is of one run.
class RunFolder {
public:
    explicit RunFolder(const std::string& path) : path_(path) {
        if (path.empty()) return;
        std::error_code error;
        std::filesystem::create_directories(path, error);
        if (error || !std::filesystem::is_directory(path)) fail("cannot make the folder {}: {}", path, error.message());
        for (const char* name : {"run.json", "measured.json", "predicted.json", "plan.json", "routing.csv"})
            std::filesystem::remove(file(name), error);
    }
    explicit operator bool() const { return !path_.empty(); }
    std::string file(const std::string& name) const { return (std::filesystem::path(path_) / name).string(); }

private:
    std::string path_;
};

double final_loss(const RunRecord& run, std::size_t& averaged) {
    averaged = std::min<std::size_t>(10, run.steps.size());
    double sum = 0.0;
    for (std::size_t i = run.steps.size() - averaged; i < run.steps.size(); ++i) sum += run.steps[i].loss;
    return sum / static_cast<double>(averaged);
}

// One line of token counts per MoE layer under a line of names: what --fix routing=FILE reads. Empty without counts.
std::string routing_csv(const std::vector<std::vector<std::int64_t>>& layers) {
    std::string text;
    for (const std::vector<std::int64_t>& layer : layers) {
        if (text.empty())
            for (std::size_t e = 0; e < layer.size(); ++e) text += fmt::format("{}expert {}", e > 0 ? "," : "", e);
        text += fmt::format("\n{}", fmt::join(layer, ","));
    }
    return text.empty() ? text : text + "\n";
}

volatile std::sig_atomic_t& terminated() {
    static volatile std::sig_atomic_t flag = 0;
    return flag;
}

// Makes SIGTERM and the first SIGINT end the run behind the step that they meet from now on; a second SIGINT ends it at
// once.
void catch_signals() {
    terminated() = 0;
    struct sigaction action {};
    action.sa_handler = [](int) { terminated() = 1; };
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGTERM, &action, nullptr);
    struct sigaction before {};
    ::sigaction(SIGINT, nullptr, &before);
    if (before.sa_handler == SIG_IGN) return; // a background job of a script, whose Ctrl-C is not meant for it
    action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
    ::sigaction(SIGINT, &action, nullptr);
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
    const train::ResumedRun now{trainer.plan().model->config_json, static_cast<std::uint64_t>(options.seed),
                                data.position(0)};
    for (const std::string& line : train::check_resume(found->path(), state, now, options.allow_change))
        console.warn("{}", line);
    trainer.restore(*found);
    if (!state.data.datasets.empty()) data.start(state.samples, state.data, train::same_order(state, now));
    console.note("Resumed from {}: step {}", found->path(), state.step);
    return true;
}

// Initial weights, or those of the newest checkpoint.
void set_weights(const ExecuteOptions& options, train::Trainer& trainer, data::SampleData& data, Console& console) {
    if (options.resume && resume(options, trainer, data, console)) return;
    if (options.init_from.empty()) return;
    std::vector<std::string> skipped;
    const std::unique_ptr<weights::StoredCheckpoint> run = weights::newest_checkpoint(options.init_from, skipped);
    for (const std::string& reason : skipped) console.warn("skipped: {}", reason);
    const train::LoadReport report =
        run ? train::load_weights(trainer, *run) : train::load_weights(trainer, options.init_from);
    if (const std::string left = train::describe(report); !left.empty())
        console.warn("{}: {}", options.init_from, left);
}

// The plan of the file with what the command line sets in its place, and the model's own balance where neither chooses
// one; `balance`: what to say of that.
plan::Plan plan_to_run(const ExecuteOptions& options, std::string& balance) {
    plan::Plan plan = plan::load_plan(options.plan);
    if (!options.balance.empty()) plan::set_field(plan, "balance", options.balance);
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

// The fingerprint of everything that all processes of a run must agree on.
std::uint64_t fingerprint(const ExecuteOptions& o, const plan::Plan& plan) {
    const std::string said =
        fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}",
                    fmt::join(o.data, " "), o.steps, o.init_from, o.checkpoint, o.save_interval, o.resume, o.shuffle,
                    o.lr, o.lr_schedule, o.min_lr, o.lr_decay_steps, o.warmup, o.betas, o.eps, o.weight_decay,
                    o.grad_clip, o.seed, o.run_dir.empty(), fmt::join(o.allow_change, " "), o.valid_data,
                    o.eval_interval, o.eval_batches, o.skip_bad_steps, o.spike_norm, o.back_after);
    return std::uint64_t{engine::crc32c(plan::plan_to_json(plan))} << 32 | engine::crc32c(said);
}

// A run that hangs cannot be made to unwind: the process says why and ends.
[[noreturn]] void end_hanging(const std::string& line, comm::Transport* transport) {
    if (transport != nullptr) transport->abort(line);
    std::fputs(fmt::format("moe-plan: {}\n", line).c_str(), stderr);
    std::_Exit(static_cast<int>(Fault::failure));
}

// The work of the ranks of this process; `transport` leads to those of others, if there are any; local: Launch::local.
class Execution {
public:
    Execution(const ExecuteOptions& options, const plan::Plan& plan, std::string balance, comm::Transport* transport,
              int local = 0)
        : options_(options),
          balance_(std::move(balance)),
          transport_(transport),
          train_with_(train_options(options)),
          first_(transport == nullptr || transport->rank() == 0),
          console_(options, !first_),
          data_(open_data(options, plan)),
          plan_(with_lengths(plan, data_)),
          valid_(open_valid_data(options, plan)),
          simulation_(
              replay::simulate(plan_, stack::load_stack(plan.stack, *plan.hardware), !options.run_dir.empty())) {
        train_with_.transport = transport;
        train_with_.device = local;
        train_with_.on_hang = [transport](const std::string& line) { end_hanging(line, transport); };
    }

    void run() {
        if (train_with_.backend == "cpu")
            check_memory(options_.plan, transport_ == nullptr ? plan_.gpus : 1, simulation_);
        if (!options_.checkpoint.empty()) catch_signals();
        train::Trainer trainer(plan_, train_with_);
        std::optional<weights::FolderLock> lock;
        if (first_ && !options_.checkpoint.empty()) lock.emplace(options_.checkpoint);
        if (lock) {
            lock->remove_partial_checkpoints();
            constexpr double bytes_of_parameter = 12.0; // the weight and both moments, in FP32
            weights::require_room(options_.checkpoint,
                                  bytes_of_parameter *
                                      static_cast<double>(model::count_parameters(*plan_.model).total));
        }
        set_weights(options_, trainer, data_, console_);
        require_one_start(trainer);
        if (first_ && !options_.metrics.empty())
            metrics_.emplace(options_.metrics, trainer.steps_done(), options_.resume);
        const RunFolder folder(first_ ? options_.run_dir : "");
        try {
            open_record(trainer, folder);
            train_and_save(trainer);
            keep_record(trainer, folder);
        } catch (const Error& error) {
            // A device's communication with a rank that is gone does not end, and whoever lets go of it waits for that.
            if (trainer.joined().communicators > 0) end_hanging(error.what(), transport_);
            throw;
        }
    }

private:
    // Processes on several hosts may find other checkpoints whole.
    void require_one_start(train::Trainer& trainer) {
        if (transport_ == nullptr) return;
        std::int64_t first = trainer.steps_done();
        transport_->broadcast(0, {reinterpret_cast<char*>(&first), sizeof first});
        if (first != trainer.steps_done())
            fail("rank {} would go on from step {}, rank 0 from step {}: is {} the same folder for both?",
                 transport_->rank(), trainer.steps_done(), first, options_.checkpoint);
    }

    void open_record(const train::Trainer& trainer, const RunFolder& folder) {
        if (folder) {
            write_file(folder.file("plan.json"), plan::plan_to_json(plan_));
            program::write_trace(simulation_.timeline, folder.file("predicted.json"));
        }
        run_.backend = train_with_.backend;
        run_.ranks = plan_.gpus;
        run_.command = options_.command;
        run_.unigram_entropy = data_.unigram_entropy();
        run_.predicted_step_seconds = simulation_.estimate.step_seconds;
        run_.peak_memory_gib = trainer.memory_gib();
        run_.joined = trainer.joined();
        const std::string place = transport_ != nullptr   ? fmt::format("{} processes", transport_->world())
                                  : run_.backend == "cpu" ? fmt::format("{} cores", trainer.permits())
                                                          : trainer.device_name();
        console_.note("{}: {} {} on {}, {} tokens per step, {:.3f} GiB in the fullest rank", plan_.model->name,
                      plan_.gpus, plan_.gpus == 1 ? "rank" : "ranks", place,
                      count_text(static_cast<double>(plan_.gbs * plan_.seq)), run_.peak_memory_gib);
        console_.note("Predicted: {} per step", seconds_text(run_.predicted_step_seconds));
        if (const comm::Joined& joined = run_.joined; joined.communicators > 0)
            console_.note("NCCL: {} communicators, which took {:.2f} GiB of a GPU with their buffers",
                          joined.communicators, joined.bytes / (1 << 30));
        if (!balance_.empty()) console_.note("Balance: {}", balance_);
        console_.note("Data: {} tokens, unigram entropy {:.4f} nats/token",
                      count_text(static_cast<double>(data_.tokens())), run_.unigram_entropy);
    }

    void train_and_save(train::Trainer& trainer) {
        StepLog log(console_, plan_, {train_with_.steps, options_.log_interval}, run_);
        device::PowerLog draws;
        std::optional<train::CheckpointWriter> writer;
        std::optional<train::Saving> saving;
        if (!options_.checkpoint.empty()) {
            const bool alone = transport_ == nullptr;
            writer.emplace(
                options_.checkpoint, alone ? fmt::format("-{}", ::getpid()) : transport_->run(),
                alone ? 0 : transport_->rank(), [this](std::int64_t sample) { return data_.position(sample); },
                static_cast<std::size_t>(options_.keep_checkpoints));
            saving.emplace(train::Saving{*writer, options_.save_interval, [] { return terminated() != 0; },
                                         options_.back_after,
                                         [this](const std::string& line) { console_.warn("{}", line); }});
        }
        train::train(
            trainer, train_with_, train::samples_of(data_),
            [&](const train::StepResult& step) {
                log.add(step);
                evaluate(trainer, log, step.step);
                if (metrics_) {
                    const std::chrono::duration<double> wall = std::chrono::system_clock::now().time_since_epoch();
                    metrics_->add(run_.steps.back(), {wall.count(), run_.peak_memory_gib});
                }
                const device::PowerLog::Time now = std::chrono::steady_clock::now();
                if (draws.due(now)) draws.add(now, trainer.power_sample());
            },
            saving ? &*saving : nullptr);
        run_.draw = draws.mean();
        if (writer && writer->saved_step() >= 0)
            console_.say("Saved step {} in {}", writer->saved_step(), options_.checkpoint);
    }

    void evaluate(train::Trainer& trainer, StepLog& log, std::int64_t step) const {
        const bool due = options_.eval_interval > 0 && step % options_.eval_interval == 0;
        if (!valid_ || (!due && step != train_with_.steps)) return;
        std::int64_t samples = valid_->samples();
        if (options_.eval_batches > 0) samples = std::min(samples, options_.eval_batches * plan_.gbs);
        const auto begin = std::chrono::steady_clock::now();
        const train::Evaluation evaluation = trainer.evaluate(train::samples_of(*valid_), samples);
        log.add(evaluation, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }

    void keep_record(const train::Trainer& trainer, const RunFolder& folder) {
        const bool recorded = trainer.steps_taken() > 0 && !(terminated() != 0 && train_with_.backend != "cpu");
        const std::string routing = routing_csv(trainer.routed_tokens());
        run_.queued = trainer.queued_step();
        if (run_.queued.nodes > 0)
            console_.note("A step is one CUDA graph of {} nodes with {} copies between host and GPU, queued in {}",
                          run_.queued.nodes, run_.queued.host_copies, seconds_text(run_.queued.host_seconds));
        if (const device::MeanPower& d = run_.draw; d.seconds > 0.0)
            console_.note("{}: {:.0f} of {:.0f} W at {:.0f} of {:.0f} MHz, over the last {:.1f} s of steps",
                          plan_.gpus > 1 ? "The GPUs' mean power and the slowest one's clock" : "The GPU", d.watts,
                          d.limit_watts, d.clock_hz / 1e6, d.top_clock_hz / 1e6, d.seconds);
        if (recorded) {
            const program::Timeline measured = trainer.timeline();
            if (first_ && !options_.trace.empty())
                write_timeline(measured, {plan_, plan_, simulation_.memory}, options_.trace);
            if (folder) program::write_trace(measured, folder.file("measured.json"));
            if (plan_.gpus > 1) {
                const double bare = exposed_communication(measured);
                console_.note("Communication, and the wait for it, with nothing computing beside it: {} of a step ({})",
                              seconds_text(bare), percent_text(bare / measured.step_seconds));
            }
        }
        if (folder) {
            write_file(folder.file("run.json"), run_document(run_));
            if (!routing.empty()) write_file(folder.file("routing.csv"), routing);
        }
        if (run_.steps.empty()) {
            console_.say("All {} steps are done: nothing to train; raise --steps to go on", trainer.steps_done());
        } else {
            std::size_t averaged = 0;
            const double loss = final_loss(run_, averaged);
            console_.say("Final loss {:.4f} nats/token (mean of the last {} steps), unigram entropy of the data {:.4f}",
                         loss, averaged, run_.unigram_entropy);
        }
        if (folder && recorded) console_.note("Next: moe-plan compare {}", options_.run_dir);
        if (options_.json && first_) print(run_document(run_));
    }

    const ExecuteOptions& options_;
    std::string balance_; // own_balance() as it is said
    comm::Transport* transport_;
    train::TrainOptions train_with_;
    bool first_; // says and writes what is said and written once
    Console console_;
    data::SampleData data_;
    plan::Plan plan_;
    std::unique_ptr<data::InOrder> valid_; // null: no evaluation
    replay::Simulation simulation_;
    RunRecord run_;
    std::optional<Metrics> metrics_;
};

} // namespace

void execute_verb(const ExecuteOptions& options) {
    train_options(options);
    refuse_overwriting("--trace", options.trace, options.plan);
    std::string balance;
    const plan::Plan plan = plan_to_run(options, balance);
    // Our own stack is exactly what the engine runs, whichever stack the plan was searched for.
    if (const plan::PlanFault fault = stack::check_stack(plan, stack::load_stack("moe-plan", *plan.hardware)))
        refuse("{}: execute cannot run it: {}", options.plan, fault.message);
    check_checkpoints(options);
    std::optional<comm::Launch> launch = comm::launch_of_environment();
    if (!launch) return Execution(options, plan, balance, nullptr).run();
    if (launch->world != plan.gpus)
        refuse("{}: has {} ranks, but {} processes were started: start one for each rank", options.plan, plan.gpus,
               launch->world);
    launch->listen = options.listen;
    launch->say = [](const std::string& line) { std::fputs(fmt::format("moe-plan: {}\n", line).c_str(), stderr); };
    comm::Transport transport(*launch, fingerprint(options, plan));
    try {
        Execution(options, plan, balance, &transport, launch->local).run();
        transport.close();
    } catch (const std::exception& error) {
        transport.abort(error.what());
        throw;
    }
}

} // namespace moe::tools
