// The loop that runs a rank's Program on a back end.
#include "engine/executor.hpp"

#include "engine/cores.hpp"
#include "planner/error.hpp"

#include <algorithm>

namespace moe {

Executor::Executor(const Program& program, const Arena& arena, const Mesh& mesh, int rank, const Backend& backend,
                   Communicator& communicator, bool replayed)
    : program_(program), arena_(arena), backend_(backend), communicator_(communicator), replayed_(replayed) {
    position_ = {
        rank, mesh.coordinate(Domain::dense, axis::tensor, rank), mesh.coordinate(Domain::dense, axis::context, rank),
        mesh.coordinate(Domain::expert, axis::expert, rank), mesh.coordinate(Domain::expert, axis::tensor, rank)};
    for (const Bucket& bucket : program.buckets)
        bucket_offset_.push_back(
            bucket.group_size > 1 ? mesh.index(bucket.group, rank) * (bucket.elements / bucket.group_size) : 0);
    std::size_t in = 0, out = 0;
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops) {
            in = std::max(in, op.in.size());
            out = std::max(out, op.out.size());
        }
    in_.resize(in);
    out_.resize(out);
    if (const Queue* queue = arena.device().queue()) stream_ = queue->stream();
}

void Executor::step(Recorder& recorder, bool timed) {
    for (std::vector<std::int64_t>& layer : routed_tokens_) std::fill(layer.begin(), layer.end(), 0);
    if (Queue* queue = arena_.device().queue()) return play(*queue, recorder, timed);
    double start = recorder.seconds_since(Recorder::Clock::now());
    for (OpWalk walk(program_); !walk.done(); walk.next()) {
        const Op& op = walk.op();
        const double waited = communicator_.waited();
        call(op, walk.slot().micro_batch, walk.slot_number());
        if (op.kind == OpKind::permute_map && op.phase == Phase::forward && !std::get<PermuteAttr>(op.attr).local)
            count_tokens(op);
        const double end = recorder.seconds_since(Recorder::Clock::now());
        recorder.record(start, end, std::max(0.0, end - start - (communicator_.waited() - waited)));
        start = end;
    }
    busy_ = false;
}

// One stamp before the first op and one after each.
void Executor::enqueue(Queue& queue, bool timed) {
    std::size_t stamps = 0;
    if (timed) queue.stamp(stamps++);
    for (OpWalk walk(program_); !walk.done(); walk.next()) {
        call(walk.op(), walk.slot().micro_batch, walk.slot_number());
        if (timed) queue.stamp(stamps++);
    }
}

// Busy time includes the wait for the host where the device has run out of queued work: stamps cannot tell.
void Executor::play(Queue& queue, Recorder& recorder, bool timed) {
    if (!replayed_) {
        enqueue(queue, false);
        return queue.wait();
    }
    if (!prepared_) {
        queue.reserve(recorder.ops() + 1);
        for (const bool stamped : {false, true}) queue.prepare(stamped, [&] { enqueue(queue, stamped); });
        prepared_ = true;
    }
    const double zero = recorder.seconds_since(Recorder::Clock::now());
    queue.play(timed, [&] { enqueue(queue, timed); });
    queue.wait();
    if (!timed) return;
    double start = 0.0;
    for (std::size_t i = 0; i < recorder.ops(); ++i) {
        const double end = queue.seconds(i + 1);
        recorder.record(zero + start, zero + end, end - start);
        start = end;
    }
}

void Executor::call(const Op& op, int micro_batch, std::size_t slot_number) {
    for (std::size_t i = 0; i < op.in.size(); ++i)
        in_[i] = op.in[i] == no_tensor ? nullptr : arena_.at(op.in[i], micro_batch);
    for (std::size_t i = 0; i < op.out.size(); ++i)
        out_[i] = op.out[i] == no_tensor ? nullptr : arena_.at(op.out[i], micro_batch);
    current_slot_ = slot_number;
    current_ = &op;
    ++calls_;
    try {
        const OpFunction function = backend_.function(op.kind);
        if (function == nullptr) fail("the {} back end has no such op", backend_.name);
        function({op, program_, position_, communicator_, *backend_.kernels, stream_, in_.data(), out_.data(),
                  op.kind == OpKind::adamw || op.kind == OpKind::expert_bias ? shard_offset(op) : 0});
    } catch (const Aborted&) {
        throw;
    } catch (const std::exception& error) {
        report(op, slot_number, error);
    }
    ++calls_;
}

Standing Executor::standing() const {
    const std::uint64_t calls = calls_;
    if (!busy_ || stream_ != nullptr || communicator_.waits()) return {calls, true, ""};
    const Op* op = current_;
    if (op == nullptr) return {calls, false, fmt::format("rank {}: before its first op", position_.rank)};
    // An odd number of calls begun and ended: it is in the op.
    return {calls, false, place(*op, current_slot_) + (calls % 2 == 0 ? " has ended, the next op has not begun" : "")};
}

std::string Executor::place(const Op& op, std::size_t slot) const {
    return fmt::format("rank {}: {} (layer {}, slot {})", position_.rank, to_string(op.kind), op.layer, slot);
}

void Executor::count_tokens(const Op& op) {
    const auto layer = static_cast<std::size_t>(std::max<std::int16_t>(0, op.layer));
    const auto experts = static_cast<std::size_t>(std::get<PermuteAttr>(op.attr).experts);
    if (routed_tokens_.size() <= layer) routed_tokens_.resize(layer + 1);
    routed_tokens_[layer].resize(experts, 0);
    const auto* counts = static_cast<const std::int32_t*>(out_[0]);
    for (std::size_t e = 0; e < experts; ++e) routed_tokens_[layer][e] += counts[e];
}

std::int64_t Executor::shard_offset(const Op& op) const {
    for (std::size_t i = 0; i < program_.buckets.size(); ++i)
        if (program_.buckets[i].master == op.out[0]) return bucket_offset_[i];
    fail("the optimizer updates a tensor that is no bucket's master");
}

void Executor::report(const Op& op, std::size_t slot, const std::exception& error) const {
    const Error* known = dynamic_cast<const Error*>(&error);
    throw Error(known != nullptr ? known->fault() : Fault::failure,
                fmt::format("{}: {}", place(op, slot), error.what()));
}

} // namespace moe
