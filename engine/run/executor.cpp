// The loop that runs a rank's Program on a back end.
#include "engine/run/executor.hpp"

#include "engine/base/cores.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/communicators.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

namespace moe::run {

namespace {

constexpr float unseen = -std::numeric_limits<float>::infinity(); // the largest of no logits

} // namespace

Executor::Executor(const program::Program& program, const device::Arena& arena, const plan::Mesh& mesh, int rank,
                   const ops::Backend& backend, comm::Communicator& communicator, bool replayed)
    : program_(program),
      arena_(arena),
      backend_(backend),
      communicator_(communicator),
      mesh_(mesh),
      replayed_(replayed) {
    position_ = {rank,
                 mesh.coordinate(plan::Domain::dense, plan::axis::tensor, rank),
                 mesh.coordinate(plan::Domain::dense, plan::axis::context, rank),
                 mesh.coordinate(plan::Domain::dense, plan::axis::context_outer, rank),
                 mesh.coordinate(plan::Domain::dense, plan::axis::context_inner, rank),
                 mesh.coordinate(plan::Domain::expert, plan::axis::expert, rank),
                 mesh.coordinate(plan::Domain::expert, plan::axis::expert_outer, rank),
                 mesh.coordinate(plan::Domain::expert, plan::axis::tensor, rank),
                 mesh.coordinate(plan::Domain::dense, plan::axis::key_parts, rank)};
    for (const program::Bucket& bucket : program.buckets)
        bucket_offset_.push_back(
            bucket.group_size > 1 ? mesh.index(bucket.group, rank) * (bucket.elements / bucket.group_size) : 0);
    if (backend.block_scaled_gemm != nullptr) blocks_.emplace(program);
    std::size_t in = 0, out = 0;
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops) {
            in = std::max(in, op.in.size());
            out = std::max(out, op.out.size());
        }
    in_.resize(in);
    out_.resize(out);
    queue_ = arena.device().queue();
    if (queue_ == nullptr) return;
    reserved_sms_ = program::reserved_sms_of(program, mesh.group_size({plan::Domain::dense, plan::axis::pipeline}));
    order_.emplace(program, arena, mesh.group_size({plan::Domain::dense, plan::axis::pipeline}));
    marked_ = mesh.size() > 1;
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        ops_.push_back(&walk.op());
        slots_.push_back(walk.slot_number());
    }
}

void Executor::step(Recorder& recorder, bool timed) {
    for (std::vector<std::int64_t>& layer : routed_tokens_) std::fill(layer.begin(), layer.end(), 0);
    clear_logits();
    if (queue_ != nullptr) {
        play(*queue_, recorder, timed);
        return fetch_logits();
    }
    double start = recorder.seconds_since(Recorder::Clock::now());
    for (program::OpWalk walk(program_); !walk.done(); walk.next()) {
        const program::Op& op = walk.op();
        const double waited = communicator_.waited();
        call(walk);
        if (op.kind == program::OpKind::permute_map && op.phase == program::Phase::forward &&
            !std::get<program::PermuteAttr>(op.attr).local)
            count_tokens(op);
        const double end = recorder.seconds_since(Recorder::Clock::now());
        recorder.record(start, end, std::max(0.0, end - start - (communicator_.waited() - waited)));
        start = end;
    }
    busy_ = false;
}

// One stamp before the first work and one behind each. Marks 2n + 1 and 2n + 2: communication op n has begun, and
// ended.
void Executor::enqueue(device::Queue& queue, bool timed) {
    communicator_.begin_step();
    if (timed) queue.stamp(0, 0);
    for (int s = 1; s < device::queue_streams; ++s)
        if (order_->used()[static_cast<std::size_t>(s)]) queue.fork(s);
    program::OpWalk walk(program_);
    int number = 0; // number of the op
    auto run = runs_recorded_ ? runs_.cbegin() : runs_.cend();
    for (std::size_t w = 0; w < order_->size(); ++w) {
        if (run != runs_.cend() && run->begin == w) {
            play_run(queue, *run, timed);
            w = run++->end - 1;
            continue;
        }
        const device::StreamOrder::Work work = (*order_)[w];
        for (; number < work.op; ++number) walk.next();
        const bool marked = marked_ && program::is_communication(walk.op().kind) && !work.boxes;
        for (const int other : work.waits)
            queue.await(static_cast<std::size_t>((*order_)[static_cast<std::size_t>(other)].signal), work.stream);
        if (marked) queue.mark(2 * number + 1, work.stream);
        call(walk, work.stream, work.boxes);
        if (marked) queue.mark(2 * number + 2, work.stream);
        if (work.signal >= 0) queue.signal(static_cast<std::size_t>(work.signal), work.stream);
        if (timed) queue.stamp(w + 1, work.stream);
    }
    for (int s = 1; s < device::queue_streams; ++s)
        if (order_->used()[static_cast<std::size_t>(s)]) queue.join(s);
}

void Executor::play(device::Queue& queue, Recorder& recorder, bool timed) {
    if (!replayed_) {
        enqueue(queue, false);
        return await_end(queue);
    }
    zero_ = recorder.seconds_since(Recorder::Clock::now());
    queue.play(timed, [&] {
        enqueue(queue, timed);
        if (!timed)
            host_seconds_[host_steps_++ % host_seconds_.size()] =
                recorder.seconds_since(Recorder::Clock::now()) - zero_;
    });
    ++calls_; // A record calls no op.
    ++calls_;
    await_end(queue);
    if (!timed) plain_[plain_steps_++ % kept_plain] = queue.played_seconds();
}

void Executor::prepare() {
    if (queue_ == nullptr) return;
    device::Queue& queue = *queue_;
    if (replayed_) usual_stamp_ = measured_event_overhead(arena_.device(), *backend_.kernels);
    queue.reserve(order_->size() + 1, static_cast<std::size_t>(order_->signals()));
    if (marked_ && !(replayed_ && queue.replays())) queue.rehearse([&] { enqueue(queue, false); });
    if (replayed_)
        for (const bool stamped : {false, true}) queue.prepare(stamped, [&] { enqueue(queue, stamped); });
    if (!runs_.empty()) record_runs(queue);
}

// Looks after the others, where there are others, until this rank's work is done: soon at first, then less and less
// often, so that a core is free for those who queue work.
void Executor::await_end(device::Queue& queue) {
    using Microseconds = std::chrono::microseconds;
    Microseconds pause{10};
    while (marked_ && !queue.idle()) {
        try {
            communicator_.check();
        } catch (const Error& error) { // The error is told with the op that waits for the others.
            const auto op = static_cast<std::size_t>(stuck());
            throw Error(error.fault(), fmt::format("{}: {}", place(*ops_[op], slots_[op]), error.what()));
        }
        std::this_thread::sleep_for(pause);
        pause = std::min(pause + pause / 8, Microseconds{200});
    }
    queue.wait();
    if (marked_) communicator_.check(); // check() tells of communication that has ended and should not have.
    busy_ = false;
}

EventClock Executor::clock_of_stamps(device::Queue& queue) {
    std::vector<double> ends;
    for (std::size_t w = 0; w < order_->size(); ++w)
        if ((*order_)[w].stream == 0) ends.push_back(std::max(ends.empty() ? 0.0 : ends.back(), queue.seconds(w + 1)));
    // The clock begins at the first op, the time of a whole step 4 to 15 us before it on an H200, when its record is
    // launched. So without stamps its ops take what they take here, less by what this step took longer than others,
    // both from launch to end.
    const double plain = plain_seconds(), longer = queue.played_seconds() - plain;
    const double ops = ends.empty() || plain <= 0.0 ? 0.0 : std::max(0.0, ends.back() - longer);
    return {std::move(ends), ops, usual_stamp_};
}

// The median of the last ones without stamps: of a second, in which a GPU at the limit of its power varies its clock
// about the one that it holds, but of no more than the later half of them, since it begins at a higher one; of five at
// least, of all where they are fewer. 0 without any.
double Executor::plain_seconds() const {
    constexpr std::size_t fewest = 5;
    constexpr double enough_seconds = 1.0;
    std::vector<double> last;
    double sum = 0.0;
    const std::size_t most = std::min(kept_plain, std::max(fewest, plain_steps_ / 2));
    while (last.size() < std::min(most, plain_steps_) && (last.size() < fewest || sum < enough_seconds)) {
        last.push_back(plain_[(plain_steps_ - 1 - last.size()) % kept_plain]);
        sum += last.back();
    }
    if (last.empty()) return 0.0;
    const auto middle = last.begin() + static_cast<std::ptrdiff_t>((last.size() - 1) / 2);
    std::nth_element(last.begin(), middle, last.end());
    return *middle;
}

// Work begins when what is before it on its stream and all that it waits for have ended; a send with the copy into its
// box. Busy time includes the wait for the host where the device has run out of queued work, and that for the other
// members of a collective.
void Executor::record(Recorder& recorder) {
    if (queue_ == nullptr) return;
    device::Queue& queue = *queue_;
    const EventClock clock = clock_of_stamps(queue);
    stamp_ = clock.event_overhead();
    removed_ = clock.removed_seconds();
    std::vector<double> ends(order_->size());
    double start = 0.0;
    for (std::size_t w = 0; w < order_->size(); ++w) {
        const device::StreamOrder::Work work = (*order_)[w];
        const bool more = w + 1 < order_->size() && (*order_)[w + 1].op == work.op;
        const bool first = w == 0 || (*order_)[w - 1].op != work.op;
        double ready = work.before >= 0 ? ends[static_cast<std::size_t>(work.before)] : 0.0;
        for (const int other : work.waits) ready = std::max(ready, ends[static_cast<std::size_t>(other)]);
        ends[w] = std::max(ready, clock.without(queue.seconds(w + 1)));
        if (first) start = ready;
        if (!more) recorder.record(zero_ + start, zero_ + ends[w], ends[w] - ready);
    }
}

void Executor::call(const program::OpWalk& at, int stream, bool boxes) {
    const program::Op& op = at.op();
    const int micro_batch = at.slot().micro_batch;
    const std::size_t slot_number = at.slot_number();
    for (std::size_t i = 0; i < op.in.size(); ++i)
        in_[i] = op.in[i] == program::no_tensor ? nullptr : arena_.at(op.in[i], micro_batch);
    for (std::size_t i = 0; i < op.out.size(); ++i)
        out_[i] = op.out[i] == program::no_tensor ? nullptr : arena_.at(op.out[i], micro_batch);
    current_slot_ = slot_number;
    current_ = &op;
    ++calls_;
    try {
        run(at, queue_ != nullptr ? queue_->stream(stream) : nullptr, boxes);
    } catch (const engine::Aborted&) {
        throw;
    } catch (const std::exception& error) {
        report(op, slot_number, error);
    }
    ++calls_;
}

void Executor::run(const program::OpWalk& at, void* stream, bool boxes) {
    const program::Op& op = at.op();
    if (program::is_communication(op.kind)) communicator_.use(op.stream, stream);
    if (boxes) {
        const program::Tensor& message = program_.tensors[static_cast<std::size_t>(op.in[0])];
        return communicator_.put(std::get<program::PeerAttr>(op.attr), in_[0], message.bytes());
    }
    const ops::OpFunction function = backend_.function(op.kind);
    if (function == nullptr) fail("the {} back end has no such op", backend_.name);
    ops::OpContext context{op,
                           program_,
                           position_,
                           communicator_,
                           *backend_.kernels,
                           stream,
                           in_.data(),
                           out_.data(),
                           0,
                           std::max(reserved_sms_, at.reserved_sms()),
                           at.merged()};
    const bool updates = op.kind == program::OpKind::adamw || op.kind == program::OpKind::adamw_on_host ||
                         op.kind == program::OpKind::expert_bias || op.kind == program::OpKind::momentum ||
                         op.kind == program::OpKind::collect || op.kind == program::OpKind::newton_schulz;
    if (updates || (op.kind == program::OpKind::sum_squares && !parts_.empty())) {
        const std::size_t bucket = bucket_of(op);
        context.shard_offset = bucket_offset_[bucket];
        if (!parts_.empty()) context.parts = parts_[bucket];
    }
    if (watches_logits_ && op.kind == program::OpKind::attention) context.largest_logits = logits_of(op);
    if (const auto format = blocks_ ? blocks_->of(op) : machine::Precision::bf16; format != machine::Precision::bf16) {
        context.block_scaled_gemm = backend_.block_scaled_gemm;
        context.block_format = format == machine::Precision::mxfp8 ? RoundFormat::mxfp8 : RoundFormat::nvfp4;
    }
    function(context);
}

Standing Executor::standing() const {
    const std::uint64_t calls = calls_;
    if (!busy_ || (queue_ != nullptr && !marked_) || communicator_.waits()) return {calls, true, "", ""};
    if (queue_ != nullptr && calls % 2 == 0) {
        std::uint64_t seen = calls;
        for (int s = 0; s < program::stream_count; ++s)
            seen = seen * 31 + static_cast<std::uint64_t>(queue_->marked(s));
        const auto op = static_cast<std::size_t>(stuck());
        return {seen, false, place(*ops_[op], slots_[op]), others(*ops_[op])};
    }
    const program::Op* op = current_;
    if (op == nullptr) return {calls, false, fmt::format("rank {}: before its first op", position_.rank), ""};
    // An odd number of calls begun and ended: it is in the op.
    return {calls, false, place(*op, current_slot_) + (calls % 2 == 0 ? " has ended, the next op has not begun" : ""),
            ""};
}

std::string Executor::others(const program::Op& op) const {
    if (!program::is_communication(op.kind)) return "";
    std::string names;
    for (const int rank : mesh_.members(op.group, position_.rank))
        if (rank != position_.rank) names += fmt::format("{} {}", names.empty() ? "rank" : ",", rank);
    return names;
}

// The first communication op that has begun and not ended; where there is none, the last one that has ended.
int Executor::stuck() const {
    int begun = -1, last = 0;
    for (int s = 0; s < program::stream_count; ++s) {
        const int mark = queue_->marked(s);
        if (mark % 2 == 1) begun = begun < 0 ? mark / 2 : std::min(begun, mark / 2);
        if (mark > 0) last = std::max(last, (mark - 1) / 2);
    }
    return begun >= 0 ? begun : last;
}

std::string Executor::place(const program::Op& op, std::size_t slot) const {
    return fmt::format("rank {}: {} (layer {}, slot {})", position_.rank, program::to_string(op.kind), op.layer, slot);
}

void Executor::count_tokens(const program::Op& op) {
    const auto layer = static_cast<std::size_t>(std::max<std::int16_t>(0, op.layer));
    const auto experts = static_cast<std::size_t>(std::get<program::PermuteAttr>(op.attr).experts);
    if (routed_tokens_.size() <= layer) routed_tokens_.resize(layer + 1);
    routed_tokens_[layer].resize(experts, 0);
    const auto* counts = static_cast<const std::int32_t*>(out_[0]);
    for (std::size_t e = 0; e < experts; ++e) routed_tokens_[layer][e] += counts[e];
}

// A captured step finds what a device has of each layer where it was.
void Executor::watch_logits() {
    watches_logits_ = true;
    if (queue_ == nullptr) return;
    for (const program::Op* op : ops_)
        if (op->kind == program::OpKind::attention) logits_of(*op);
    std::size_t heads = 0;
    for (const std::vector<float>& layer : largest_logits_) heads += layer.size();
    if (heads == 0) return;
    flat_logits_.resize(heads);
    device::Device& device = arena_.device();
    device_logits_ = device::Memory(device.allocate(heads * sizeof(float)), {&device});
    if (!device_logits_) fail("rank {}: {} has no memory for the largest logits", position_.rank, device.name());
}

void Executor::clear_logits() {
    for (std::vector<float>& layer : largest_logits_) std::fill(layer.begin(), layer.end(), unseen);
    if (!device_logits_) return;
    std::fill(flat_logits_.begin(), flat_logits_.end(), unseen);
    arena_.device().write(device_logits_.get(), flat_logits_.data(), flat_logits_.size() * sizeof(float));
}

void Executor::fetch_logits() {
    if (!device_logits_) return;
    arena_.device().read(flat_logits_.data(), device_logits_.get(), flat_logits_.size() * sizeof(float));
    auto next = flat_logits_.cbegin();
    for (std::vector<float>& layer : largest_logits_) {
        std::copy_n(next, layer.size(), layer.begin());
        next += static_cast<std::ptrdiff_t>(layer.size());
    }
}

// TP splits the heads, and CP again where its ranks trade them for tokens; round a ring each has all of its TP rank's.
float* Executor::logits_of(const program::Op& op) {
    const auto& attr = std::get<program::AttentionAttr>(op.attr);
    const auto layer = static_cast<std::size_t>(op.layer);
    const int trading = mesh_.group_size({plan::Domain::dense, plan::axis::context_inner});
    const int part = position_.tensor * trading + position_.heads;
    const int parts = mesh_.group_size({plan::Domain::dense, plan::axis::tensor}) * trading;
    if (largest_logits_.size() <= layer) largest_logits_.resize(layer + 1);
    std::vector<float>& heads = largest_logits_[layer];
    heads.resize(static_cast<std::size_t>(parts) * static_cast<std::size_t>(attr.heads), unseen);
    float* all = heads.data();
    if (device_logits_) {
        all = static_cast<float*>(static_cast<void*>(device_logits_.get()));
        for (std::size_t before = 0; before < layer; ++before) all += largest_logits_[before].size();
    }
    return all + static_cast<std::ptrdiff_t>(part) * attr.heads;
}

// The bucket whose master an op updates, or whose gradients it squares or turns into updates.
std::size_t Executor::bucket_of(const program::Op& op) const {
    if (const auto* muon = std::get_if<program::MuonAttr>(&op.attr)) return static_cast<std::size_t>(muon->bucket);
    const bool gradients = op.kind == program::OpKind::sum_squares || op.kind == program::OpKind::momentum;
    for (std::size_t i = 0; i < program_.buckets.size(); ++i) {
        const program::Bucket& bucket = program_.buckets[i];
        const program::TensorId master = bucket.steps_on_host() ? bucket.host_master : bucket.master;
        if (gradients ? bucket.gradient_shard == op.in[0] : master == op.out[0]) return i;
    }
    fail("the optimizer works on a tensor that is no bucket's");
}

void Executor::report(const program::Op& op, std::size_t slot, const std::exception& error) const {
    const Error* known = dynamic_cast<const Error*>(&error);
    throw Error(known != nullptr ? known->fault() : Fault::failure,
                fmt::format("{}: {}", place(op, slot), error.what()));
}

} // namespace moe::run
