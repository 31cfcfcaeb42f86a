// The verb execute: trains with exactly the given plan and keeps what compare needs.
#include "engine/backends/backends.hpp"
#include "engine/base/crc32c.hpp"
#include "engine/train/data_source.hpp"
#include "engine/train/trainer.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/block_scaling.hpp"
#include "simulator/replay/simulate.hpp"
#include "tools/history/metrics.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/report/exposed_comm.hpp"
#include "tools/report/run_report.hpp"
#include "tools/report/step_log.hpp"
#include "tools/report/trace_file.hpp"
#include "tools/verbs/execute_setup.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

namespace moe::tools {

namespace {

// The ranks of this process: a plan that does not fit must be refused before the system kills the process.
void check_memory(const std::string& place, int ranks, const replay::Simulation& simulation) {
    const double mean = std::accumulate(simulation.memory_bytes.begin(), simulation.memory_bytes.end(), 0.0) /
                        static_cast<double>(simulation.memory_bytes.size());
    const double machine =
        static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
    if (mean * ranks > machine)
        refuse("{}: {} of it {} {:.1f} GiB, this machine has {:.1f} GiB: use a smaller model, batch or sequence", place,
               counted(ranks, "rank"), ranks == 1 ? "needs" : "need", gib(mean * ranks), gib(machine));
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

template <class... Value>
std::string words(Value&&... values) {
    std::string text;
    ((text += fmt::format("{}\n", std::forward<Value>(values))), ...);
    return text;
}

// The fingerprint of everything that all processes of a run must agree on.
std::uint64_t fingerprint(const ExecuteOptions& o, const plan::Plan& plan) {
    const std::string said =
        words(fmt::join(o.data, " "), o.steps, o.init_from, o.from_torch_dist, o.upcycle, o.checkpoint, o.save_interval,
              o.resume, o.shuffle, o.lr, o.lr_schedule, o.min_lr, o.lr_decay_steps, o.warmup, o.betas, o.eps,
              o.weight_decay, o.grad_clip, o.qk_clip, o.qk_clip_alpha, o.seed, o.run_dir.empty(),
              fmt::join(o.allow_change, " "), o.valid_data, o.eval_interval, o.eval_batches, o.skip_bad_steps,
              o.spike_norm, o.back_after, fmt::join(o.freeze, " "), fmt::join(o.lr_groups, " "), o.ema,
              o.rampup_batch_size, o.record_routing, o.replay_routing);
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
          simulation_(replay::simulate(plan_, stack::load_stack(plan.stack, *plan.hardware),
                                       !options.run_dir.empty() || !options.report.empty())) {
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
            // The weight and both moments, in FP32, and the average where there is one. Adapters are little beside the
            // weights that they freeze, which have no moments.
            const std::size_t kinds = weights::kinds_of(train_with_.ema > 0.0, plan_.lora.on() ? 0 : 2).size();
            const double bytes_of_parameter = 4.0 * static_cast<double>(kinds);
            weights::require_room(options_.checkpoint,
                                  bytes_of_parameter *
                                      static_cast<double>(model::count_parameters(*plan_.model).total));
        }
        set_weights(options_, trainer, data_, console_);
        require_one_start(trainer);
        trainer.check_replay();
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
        const std::string place = transport_ != nullptr   ? counted(transport_->world(), "process")
                                  : run_.backend == "cpu" ? counted(trainer.permits(), "core")
                                                          : trainer.device_name();
        console_.note("{}: {} on {}, {} per step, {:.3f} GiB in the fullest rank", plan_.model->name,
                      counted(plan_.gpus, "rank"), place, counted(plan_.gbs * plan_.seq, "token"),
                      run_.peak_memory_gib);
        console_.note("Predicted: {} per step", seconds_text(run_.predicted_step_seconds));
        if (plan::has_block_products(plan_) && backends::backend_named(run_.backend).block_scaled_gemm != nullptr)
            console_.warn("Dense products in {} are block-scaled ones of cuBLASLt: this path is compiled, not run, on "
                          "no such GPU by us",
                          machine::to_string(std::max(plan_.precision, plan_.head())));
        if (const comm::Joined& joined = run_.joined; joined.communicators > 0)
            console_.note("NCCL: {}, which took {:.2f} GiB of a GPU with buffers",
                          counted(joined.communicators, "communicator"), joined.bytes / (1 << 30));
        if (!run_.joined.slots_by.empty()) console_.note("Between NVLink domains: {}", run_.joined.slots_by);
        if (const double gib = trainer.average_gib(); gib > 0.0)
            console_.note("The average of the weights takes {:.3f} GiB of host memory in the fullest rank", gib);
        if (!balance_.empty()) console_.note("Balance: {}", balance_);
        console_.note("Data: {}, unigram entropy {:.4f} nats/token", counted(data_.tokens(), "token"),
                      run_.unigram_entropy);
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
        const bool recorded = trainer.recorded();
        const std::vector<std::vector<std::int64_t>> routed = trainer.routed_tokens();
        const std::string routing = routing_csv(routed);
        run_.queued = trainer.queued_step();
        if (run_.queued.nodes > 0)
            console_.note("A step {} of {} with {} between host and GPU, queued in {}",
                          plan_.cuda_graph == plan::CudaGraph::full
                              ? "is one CUDA graph"
                              : "runs " + counted(run_.queued.records, "CUDA graph"),
                          counted(run_.queued.nodes, "node"), counted(run_.queued.host_copies, "copy"),
                          seconds_text(run_.queued.host_seconds));
        if (const device::MeanPower& d = run_.draw; d.seconds > 0.0)
            console_.note("{}: {:.0f} of {:.0f} W at {:.0f} of {:.0f} MHz, over the last {:.1f} s of steps",
                          plan_.gpus > 1 ? "The GPUs' mean power and the slowest one's clock" : "The GPU", d.watts,
                          d.limit_watts, d.clock_hz / 1e6, d.top_clock_hz / 1e6, d.seconds);
        std::optional<program::Timeline> measured;
        if (recorded) {
            measured = trainer.timeline();
            if (first_ && !options_.trace.empty())
                write_timeline(*measured, {plan_, plan_, simulation_.memory}, options_.trace);
            if (folder) program::write_trace(*measured, folder.file("measured.json"));
            if (plan_.gpus > 1) {
                const double bare = exposed_communication(*measured);
                console_.note("Communication, and the wait for it, with nothing computing beside it: {} of a step ({})",
                              seconds_text(bare), percent_text(bare / measured->step_seconds));
            }
        }
        if (folder) {
            write_file(folder.file("run.json"), run_document(run_));
            if (!routing.empty()) write_file(folder.file("routing.csv"), routing);
        }
        if (first_ && !options_.report.empty()) write_report(routed, measured);
        if (run_.steps.empty()) {
            console_.say("Nothing to train: {} done; raise --steps to go on", counted(trainer.steps_done(), "step"));
        } else {
            std::size_t averaged = 0;
            const double loss = final_loss(run_, averaged);
            console_.say("Final loss {:.4f} nats/token ({}), unigram entropy of the data {:.4f}", loss,
                         averaged == 1 ? "of one step" : fmt::format("mean of the last {} steps", averaged),
                         run_.unigram_entropy);
        }
        if (folder && recorded) console_.note("Next: moe-plan compare {}", options_.run_dir);
        if (options_.json && first_) print(run_document(run_));
    }

    void write_report(const std::vector<std::vector<std::int64_t>>& routed,
                      const std::optional<program::Timeline>& measured) {
        RunReport report{simulation_.timeline, measured ? &*measured : nullptr, &run_, {}, options_.command};
        for (const std::vector<std::int64_t>& layer : routed) report.routed.emplace_back(layer.begin(), layer.end());
        write_run_report(report, options_.report);
        console_.note("Report in {}", options_.report);
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
    refuse_overwriting("--report", options.report, options.plan);
    refuse_overwriting("--report", options.report, options.trace);
    std::string balance;
    const plan::Plan plan = plan_to_run(options, balance);
    // Our own stack is exactly what the engine runs, whichever stack the plan was searched for.
    if (const plan::PlanFault fault = stack::check_stack(plan, stack::load_stack("moe-plan", *plan.hardware)))
        refuse("{}: execute cannot run it: {}", options.plan, fault.message);
    check_checkpoints(options);
    std::optional<comm::Launch> launch = comm::launch_of_environment();
    if (!launch) return Execution(options, plan, balance, nullptr).run();
    if (launch->world != plan.gpus)
        refuse("{}: has {}, but {} {} started: start one for each rank", options.plan, counted(plan.gpus, "rank"),
               counted(launch->world, "process"), launch->world == 1 ? "was" : "were");
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
