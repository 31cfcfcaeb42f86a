// Set-up of the ranks of one process, the step they take together, and global views of their weights.
#include "engine/backends/backends.hpp"
#include "engine/train/trainer_processes.hpp"

#include "engine/run/executable.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/overflow_retry.hpp"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

namespace moe::train {
namespace {

plan::Plan sound(const plan::Plan& plan) {
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("execute: {}", fault.message);
    return plan;
}

// The plan by which nothing overflows.
plan::Plan forward_plan(const plan::Plan& plan) { return plan::overflow_retry_plan(plan).value_or(plan); }

} // namespace

Trainer::Trainer(const plan::Plan& plan, const TrainOptions& options)
    : plan_(options.forward_only ? forward_plan(sound(plan)) : sound(plan)),
      options_(options),
      mesh_(plan),
      backend_(options.table != nullptr ? options.table : &backends::backend_named(options.backend)) {
    check_options(options);
    if (plan_.indexer.stage == plan::IndexerStage::warm_up && !options.forward_only)
        options_.rules.freeze.emplace_back("!indexer");
    check_qk_clip(options.qk_clip, plan_, options_.rules, *backend_);
    check_ramp(options.ramp, plan_);
    check_moments(options.rules, plan_);
    batch_ = plan_.gbs;
    if (!plan_.model->not_executable.empty())
        refuse("execute: the model cannot be trained here: {}", plan_.model->not_executable);
    if (plan_.lora.on() && options_.ema > 0.0)
        refuse("--ema {}: an average is of all weights, of which lora = {} trains none", options_.ema,
               plan::to_string(plan_.lora));
    if (transport() != nullptr && transport()->world() != plan_.gpus)
        refuse("execute: {}, but the plan has {}: start one for each", counted(transport()->world(), "process"),
               counted(plan_.gpus, "rank"));
    std::vector<memory::MemoryPlan> memory;
    for (int stage = 0; stage < plan_.pp; ++stage)
        programs_.push_back(options_.forward_only ? lower::lower_forward(plan_, stage, *options_.forward_only)
                                                  : lower::lower(plan_, stage));
    run::check_executable(plan_, programs_, *backend_);
    kept_routing_ = keep_routing(programs_, true);
    if (const std::optional<plan::Plan> again = plan::overflow_retry_plan(plan_); again && !options_.forward_only) {
        for (int stage = 0; stage < plan_.pp; ++stage) reruns_.push_back(lower::lower(*again, stage));
        run::check_executable(*again, reruns_, *backend_);
        keep_routing(reruns_, true);
    }
    if (options_.evaluates && !options_.forward_only) lower_evaluation();
    for (const program::Program& program : programs_) {
        memory.push_back(options_.forward_only ? memory::plan_memory(program)
                                               : memory::plan_memory_with_retry(plan_, program));
        for (const std::vector<program::Program>* others : {&forwards_, &reruns_})
            if (!others->empty())
                memory.back().arena_bytes = std::max(
                    memory.back().arena_bytes,
                    memory::plan_memory((*others)[static_cast<std::size_t>(program.pipeline_rank)]).arena_bytes);
        arena_bytes_ = std::max(arena_bytes_, memory.back().arena_bytes);
    }

    ranks_.resize(static_cast<std::size_t>(transport() != nullptr ? 1 : plan_.gpus));
    // The thread of a rank with a device mostly waits for that: all may run.
    const int places = static_cast<int>(ranks_.size());
    cores_ = std::make_unique<engine::Cores>(places, backend_->devices != nullptr ? places : options_.permits);
    device_of(places - 1); // device_of() refuses a device that this machine has not.
    if (transport() == nullptr) fabric_ = std::make_unique<comm::ThreadFabric>(mesh_, *cores_);
    tokens_.resize(static_cast<std::size_t>(plan_.gbs * (plan_.seq + 1)));
    counts_.resize(tokens_.size(), 1);
    if (plan_.masks_documents()) starts_.resize(tokens_.size());
    label_shares_.resize(1 + plan_.model->mtp.size(), 1.0f);
    kept_.resize(static_cast<std::size_t>(std::max(1, options_.kept_steps)));
    // Ranks are built on their own threads: filling the arenas takes as long as a step and touches the memory where it
    // will be used.
    run_ranks([&](Rank& rank, int place) { build_rank(rank, place, memory); });
    if (backend_->collectives != nullptr && plan_.gpus > 1) join_devices(memory);
    index_parameters();
    run_ranks([&](Rank& rank, int) { start_rank(rank); });
    // Stamps between ops cost a GPU time; on the CPU the clock is read anyway. One of three steps is not disturbed.
    constexpr std::int64_t recorded = 3;
    if (ranks_.front().device->queue() != nullptr)
        first_timed_ = options_.steps - (options_.steps >= 3 * recorded ? recorded : 1);
    for (int rank = 0; rank < plan_.gpus; ++rank) {
        const std::vector<plan::Stage>& chunks = programs_[static_cast<std::size_t>(stage_of_rank(rank))].chunks;
        if (std::any_of(chunks.begin(), chunks.end(), [](const plan::Stage& stage) { return stage.loss; }))
            loss_rank_ = rank;
    }
    if (options_.on_hang && options_.hang_timeout > 0.0)
        watchdog_ = std::make_unique<run::Watchdog>(
            static_cast<int>(ranks_.size()), options_.hang_timeout,
            [this](int place) {
                const Rank& rank = ranks_[static_cast<std::size_t>(place)];
                Beside Rank::*const beside = beside_;
                const std::int64_t smaller = smaller_batch_;
                run::Standing standing = (smaller > 0         ? rank.smaller.at(smaller).executor
                                          : beside != nullptr ? (rank.*beside).executor
                                                              : rank.executor)
                                             ->standing();
                if (transport() != nullptr) standing.gone = transport()->gone();
                return standing;
            },
            options_.on_hang);
}

int Trainer::stage_of_rank(int rank) const { return mesh_.coordinate(plan::Domain::dense, plan::axis::pipeline, rank); }

// Throws as well when the rank of another process has failed.
void Trainer::run_ranks(const std::function<void(Rank&, int)>& job) {
    cores_->run([&](int place) {
        try {
            job(ranks_[static_cast<std::size_t>(place)], place);
        } catch (...) {
            if (queued_fabric_) queued_fabric_->fail();
            throw;
        }
    });
    if (transport() == nullptr) return;
    if (const std::string why = transport()->aborted(); !why.empty()) fail("{}", why);
}

void Trainer::build_rank(Rank& r, int place, const std::vector<memory::MemoryPlan>& memory) {
    const int rank = r.rank = transport() != nullptr ? transport()->rank() : place;
    ::pthread_setname_np(::pthread_self(), fmt::format("rank {}", rank).c_str()); // Debuggers and `top -H` show it.
    r.stage = stage_of_rank(rank);
    r.data = mesh_.coordinate(plan::Domain::dense, plan::axis::data, rank);
    const program::Program& program = program_of(r);
    r.device = backend_->open(plan_.cuda_graph == plan::CudaGraph::full, device_of(place));
    r.arena =
        std::make_unique<device::Arena>(program, memory[static_cast<std::size_t>(r.stage)], mesh_, rank, *r.device);
    if (transport() != nullptr)
        r.communicator = std::make_unique<comm::ProcessCommunicator>(*transport(), mesh_);
    else
        r.communicator = std::make_unique<comm::ThreadCommunicator>(*fabric_, rank);
    r.recorder = std::make_unique<run::Recorder>(program, rank, options_.kept_steps);
    r.parameters = weights::local_parameters(program, mesh_, rank);
    const int cores = static_cast<int>(std::thread::hardware_concurrency()) / static_cast<int>(ranks_.size());
    weights::initialize_parameters(program, r.parameters, *r.arena, *backend_->kernels, options_.seed,
                                   std::max(cores, 1));
    r.positions = positions_of(rank);
    r.device->write(r.arena->at(program.io.positions), r.positions.data(), r.positions.size() * sizeof r.positions[0]);
    if (plan_.masks_documents() || program_of(r).io.chunk_starts != program::no_tensor) {
        const int ring = plan_.cp / plan::context_inner(plan_);
        r.queries = positions_of(mesh_.coordinate(plan::Domain::dense, plan::axis::context_outer, rank), ring);
    }
}

// Two runs of the sequence where several members share it.
std::vector<std::int32_t> Trainer::positions_of(int member, int members) const {
    const std::int64_t tokens = plan_.seq / members;
    std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
    const auto start = [&](int run) {
        return static_cast<std::int32_t>(plan::run_start(member, run, members, tokens));
    };
    const auto half = static_cast<std::ptrdiff_t>(members > 1 ? tokens / 2 : tokens);
    std::iota(positions.begin(), positions.begin() + half, start(0));
    std::iota(positions.begin() + half, positions.end(), start(1));
    return positions;
}

std::vector<std::int32_t> Trainer::positions_of(int rank) const {
    return positions_of(mesh_.coordinate(plan::Domain::dense, plan::axis::context, rank), plan_.cp);
}

void Trainer::start_rank(Rank& r) {
    r.executor = std::make_unique<run::Executor>(program_of(r), *r.arena, mesh_, r.rank, *backend_, *r.communicator);
    if (!options_.rules.empty()) r.executor->set_parts(parts_of_buckets(r));
    if (options_.qk_clip.on()) r.executor->watch_logits();
    if (plan_.cuda_graph != plan::CudaGraph::none && plan_.cuda_graph != plan::CudaGraph::full)
        r.executor->capture_scopes(plan_);
    r.executor->prepare();
    if (!reruns_.empty()) build_beside(r, reruns_[static_cast<std::size_t>(r.stage)], r.rerun);
    if (!forwards_.empty()) build_beside(r, forwards_[static_cast<std::size_t>(r.stage)], r.forward);
}

void Trainer::build_beside(Rank& r, const program::Program& second, Beside& beside) const {
    const program::Program& program = program_of(r);
    const memory::MemoryPlan memory = memory::plan_memory(second, plan_.micro_batches());
    if (!memory::same_states(program, memory::plan_memory(program), second, memory))
        fail("rank {}: the Program that runs in place of a step has its weights elsewhere", r.rank);
    beside.arena = std::make_unique<device::Arena>(second, memory, mesh_, r.rank, *r.arena);
    beside.executor =
        std::make_unique<run::Executor>(second, *beside.arena, mesh_, r.rank, *backend_, *r.communicator, false);
    if (!options_.rules.empty()) beside.executor->set_parts(parts_of_buckets(r));
    if (options_.qk_clip.on()) beside.executor->watch_logits();
    beside.executor->prepare();
    beside.recorder = std::make_unique<run::Recorder>(second, r.rank, 1);
}

// Programs that run in place of a step have the same buckets.
std::vector<std::vector<ops::ShardPart>> Trainer::parts_of_buckets(const Rank& rank) const {
    std::vector<std::vector<ops::ShardPart>> parts;
    for (const program::Bucket& bucket : program_of(rank).buckets)
        parts.push_back(parts_of(options_.rules, rank.parameters, static_cast<int>(parts.size()),
                                 bucket.elements / bucket.group_size));
    return parts;
}

void Trainer::index_parameters() {
    std::map<std::string, std::int64_t> held;
    const auto count = [&](const weights::LocalParameter& p) {
        shapes_[p.name] = {p.rows, p.cols};
        if (p.copy) return;
        for (const weights::Piece& piece : p.pieces) held[p.name] += piece.count;
    };
    for (std::size_t place = 0; place < ranks_.size(); ++place)
        for (std::size_t i = 0; i < ranks_[place].parameters.size(); ++i) {
            const weights::LocalParameter& p = ranks_[place].parameters[i];
            count(p);
            if (!p.pieces.empty()) holders_[p.name].push_back({static_cast<int>(place), i});
        }
    for (int rank = 0; transport() != nullptr && rank < plan_.gpus; ++rank) { // ranks of other processes
        if (rank == transport()->rank()) continue;
        const program::Program& program = programs_[static_cast<std::size_t>(stage_of_rank(rank))];
        for (const weights::LocalParameter& p : weights::local_parameters(program, mesh_, rank)) count(p);
    }
    for (const auto& [name, shape] : shapes_)
        if (held[name] != shape.rows * shape.cols)
            fail("the ranks hold {} elements of {}, which has {} x {}", held[name], name, shape.rows, shape.cols);
    std::vector<std::string> names;
    for (const auto& shape : shapes_) names.push_back(shape.first);
    check_rules(options_.rules, names);
}

StepResult Trainer::step(const SampleSource& source) {
    if (source.counts && !plan_.masks_documents())
        refuse("execute: labels that do not count need a plan with documents = mask");
    batch_ = options_.ramp.batch(samples_, plan_.gbs);
    prepare_batch();
    take_samples(source, samples_, samples_ + batch_);
    if (plan_.masks_documents()) count_labels();
    load_routing();
    if (options_.ema > 0.0 && !ranks_.front().average.started())
        run_ranks([&](Rank& r, int) { r.average.start(program_of(r), *r.arena); });
    const double lr = learning_rate(options_, done_);
    set_hyper(lr);
    zero_ = run::Recorder::Clock::now();
    const bool timed = done_ >= first_timed_ && batch_ == plan_.gbs;
    run_step(timed);
    const double seconds = std::chrono::duration<double>(run::Recorder::Clock::now() - zero_).count();
    if (timed && ranks_.front().device->queue() != nullptr)
        run_ranks([](Rank& r, int) { r.executor->record(*r.recorder); });
    // The timeline's rows add up to this: a recorded step is as long as those that are not.
    const double stamps = timed ? ranks_.front().executor->removed_seconds() : 0.0;
    kept_[static_cast<std::size_t>(done_) % kept_.size()] = {seconds, seconds - stamps};
    const double too_many = overflow();
    if (too_many > 0.0) run_again();
    replayed_.clear(); // Evaluations route by themselves.
    ++done_;
    samples_ += batch_;
    record_routing();
    const auto [loss, norm, mtp_loss] = step_sums();
    StepResult result{done_, loss, std::sqrt(norm), lr, seconds, batch_ * plan_.seq, 0.0, too_many, false, {}};
    result.skipped = options_.skip_bad && bad_.add(static_cast<float>(norm), hyper_[8]);
    if (!result.skipped) keep_largest();
    if (options_.qk_clip.on()) result.logits = clip_heads(result.skipped, too_many > 0.0);
    if (options_.ema > 0.0 && !result.skipped)
        run_ranks([&](Rank& r, int) { r.average.follow(program_of(r), *r.arena, options_.ema); });
    if (too_many > 0.0 || options_.ema > 0.0 || options_.qk_clip.on())
        result.seconds = std::chrono::duration<double>(run::Recorder::Clock::now() - zero_).count();
    if (!plan_.model->mtp.empty()) result.mtp_loss = mtp_loss / static_cast<double>(plan_.model->mtp.size());
    result.routers = read_routers(too_many > 0.0);
    result.indexers = read_indexers();
    return result;
}

// Every rank has the sum over all of them.
double Trainer::overflow() const {
    const Rank& rank = ranks_.front();
    return reruns_.empty() ? 0.0 : read_scalar(rank, program_of(rank).io.overflow);
}

// Inputs and scalars of both Programs lie at the same places, and no weight has changed.
void Trainer::run_again() {
    run_beside(&Rank::rerun);
    if (const double left = overflow(); left > 0.0)
        fail("step {}: {} routed rows have no place in buffers for the worst case", done_ + 1, left);
}

// Inputs are those of the step.
void Trainer::run_beside(Beside Rank::*beside) {
    for (Rank& rank : ranks_) (rank.*beside).executor->begin();
    beside_ = beside;
    run_ranks([&](Rank& r, int) {
        begin_rank(r);
        (r.*beside).recorder->begin_step(0, zero_);
        (r.*beside).executor->step(*(r.*beside).recorder, false);
    });
    beside_ = nullptr;
}

// Returns the sums as the rank that computes the loss has them.
std::array<double, 3> Trainer::step_sums() const {
    std::array<double, 3> values{};
    const bool here = transport() == nullptr || transport()->rank() == loss_rank_;
    if (here) {
        const Rank& rank = ranks_[transport() == nullptr ? static_cast<std::size_t>(loss_rank_) : 0];
        const program::ProgramIo& io = program_of(rank).io;
        values = {read_scalar(rank, io.loss), read_scalar(rank, io.gradient_norm),
                  io.mtp_loss != program::no_tensor ? read_scalar(rank, io.mtp_loss) : 0.0};
    }
    if (transport() != nullptr)
        among_processes([&](comm::Transport& t) {
            t.broadcast(loss_rank_, {reinterpret_cast<char*>(values.data()), sizeof values});
            return 0;
        });
    return values;
}

bool Trainer::any(bool here) const {
    return transport() == nullptr ? here : among_processes([here](comm::Transport& t) { return t.any(here); });
}

double Trainer::read_scalar(const Rank& rank, program::TensorId id) const {
    float value = 0.0f;
    rank.device->read(&value, rank.arena->at(id), sizeof value);
    return value;
}

void Trainer::begin_rank(Rank& r) {
    const program::Program& program = program_of(r);
    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        const program::Tensor& tensor = program.tensors[id];
        if (tensor.storage == program::Storage::scalar && tensor.base == program::no_tensor)
            r.device->fill(r.arena->at(static_cast<program::TensorId>(id)), 0,
                           static_cast<std::size_t>(tensor.bytes()));
    }
    r.device->write(r.arena->at(program.io.hyper), hyper_.data(), sizeof hyper_);
    for (const program::RouterIo& io : program.io.routers) {
        if (io.last_load == program::no_tensor) continue;
        const auto known = last_load_.find(io.layer);
        const auto bytes = static_cast<std::size_t>(io.experts) * sizeof(float);
        if (known == last_load_.end())
            r.device->fill(r.arena->at(io.last_load), 0, bytes);
        else
            r.device->write(r.arena->at(io.last_load), known->second.data(), bytes);
    }
    if (!program.io.scaled.empty()) write_windows(r);
    fill_inputs(r);
}

program::Timeline Trainer::timeline() const {
    if (!recorded()) fail("no step has been recorded");
    const auto kept = static_cast<std::int64_t>(kept_.size());
    std::vector<std::pair<KeptStep, std::int64_t>> steps;
    const std::int64_t first = begun_ + (done_ - begun_ > 1 && kept > 1 ? 1 : 0);
    for (std::int64_t s = std::max({first, done_ - kept, first_timed_, first_full_}); s < done_; ++s)
        steps.emplace_back(kept_[static_cast<std::size_t>(s % kept)], s);
    std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.first.taken < b.first.taken; });
    std::pair<KeptStep, std::int64_t> median = steps[(steps.size() - 1) / 2];
    if (transport() != nullptr) // All processes report the times of one step.
        among_processes([&](comm::Transport& t) {
            t.broadcast(0, {reinterpret_cast<char*>(&median), sizeof median});
            return 0;
        });
    const double seconds = median.first.seconds;
    const std::int64_t step = median.second;
    program::Timeline timeline;
    timeline.predicted = false;
    timeline.plan_json = plan::plan_to_json(plan_);
    timeline.step_seconds = seconds;
    timeline.tflops_per_gpu =
        plan::flops_per_token(plan_) * static_cast<double>(plan_.gbs * plan_.seq) / seconds / plan_.gpus / 1e12;
    timeline.memory_gib = memory_gib();
    std::vector<std::vector<program::TimelineRow>> rows;
    for (const Rank& rank : ranks_) rows.push_back(rank.recorder->rows(static_cast<std::size_t>(step)));
    if (transport() != nullptr) rows = gathered(rows.front());
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        timeline.ranks.push_back(static_cast<int>(rank));
        timeline.pipeline_rank.push_back(stage_of_rank(static_cast<int>(rank)));
        timeline.represents.push_back(1);
        timeline.rows.insert(timeline.rows.end(), rows[rank].begin(), rows[rank].end());
    }
    return timeline;
}

} // namespace moe::train
