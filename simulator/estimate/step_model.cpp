// Plays the slots of all pipeline ranks against each other: a recurrence over the schedule, without any ops.
#include "simulator/estimate/step_model.hpp"

#include "planner/base/error.hpp"
#include "simulator/estimate/step_ends.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>

namespace moe::estimate {

namespace {

class Pipeline {
public:
    Pipeline(const plan::Plan& plan, const StepModel& model, Orders& orders, int micro_batches)
        : plan_(plan),
          model_(model),
          micro_batches_(micro_batches),
          stages_(plan.pp * plan.vpp),
          forward_(static_cast<std::size_t>(stages_) * static_cast<std::size_t>(micro_batches), -1.0),
          backward_(forward_) {
        for (int r = 0; r < plan.pp; ++r) {
            RankState rank;
            rank.turns = &orders.of(plan, micro_batches, r).turns;
            rank.backwards_left.assign(static_cast<std::size_t>(plan.vpp), micro_batches);
            rank.forwards_left = rank.backwards_left;
            for (int c = 0; c < plan.vpp; ++c) {
                rank.first_bucket.push_back(rank.buckets.size());
                for (const BucketTime& bucket : chunk(r, c).buckets) rank.buckets.push_back(&bucket);
            }
            begin_step(plan, model, rank);
            ranks_.push_back(std::move(rank));
        }
    }

    std::vector<RankPlay> play() {
        for (bool moved = true, guess = false; !done();) {
            moved = false;
            for (int r = 0; r < plan_.pp; ++r) {
                while (advance(r, guess && !moved)) moved = true;
            }
            if (!moved && guess) fail("pp {}, vpp {}: the schedule deadlocks", plan_.pp, plan_.vpp);
            guess = !moved;
        }
        return finish_step(plan_, model_, ranks_);
    }

private:
    bool done() const {
        return std::all_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return r.next == r.turns->size(); });
    }
    const ChunkModel& chunk(int r, int c) const {
        return model_
            .chunks[static_cast<std::size_t>(model_.ranks[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)])];
    }
    std::size_t at(int stage, int micro_batch) const {
        return static_cast<std::size_t>(stage) * static_cast<std::size_t>(micro_batches_) +
               static_cast<std::size_t>(micro_batch);
    }

    // The time when the message of a turn arrives; negative while it has not been sent.
    double arrival(int r, const plan::Turn& turn) const {
        const int stage = turn.chunk * plan_.pp + r;
        if (turn.forward()) return stage == 0 ? 0.0 : forward_[at(stage, turn.micro_batch)];
        return stage == stages_ - 1 ? 0.0 : backward_[at(stage, turn.micro_batch)];
    }

    bool advance(int r, bool guess) {
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        if (rank.next == rank.turns->size()) return false;
        const plan::Turn& turn = (*rank.turns)[rank.next];
        const double first = arrival(r, turn);
        if (turn.merged) {
            const plan::Turn& other = (*rank.turns)[rank.next + 1];
            const double second = arrival(r, other);
            if (first >= 0.0 && second >= 0.0) {
                pair(r, turn, first, other, second);
                return true;
            }
            if (!guess || first < 0.0) return false;
        }
        if (first < 0.0) return false;
        single(r, turn, first);
        return true;
    }

    bool receives(int r, const plan::Turn& turn) const {
        const int stage = turn.chunk * plan_.pp + r;
        return turn.forward() ? stage > 0 : stage + 1 < stages_;
    }
    // Messages are received one after another in the order of the slots (a pair's forward first), early ones behind
    // late ones.
    double receive(int r, const plan::Turn& turn, double arrived) {
        if (!receives(r, turn)) return replay::MaxPlusMatrix::never;
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        rank.in_free = std::max({rank.in_free, arrived, rank.clocks.host}) + model_.receive;
        rank.clocks.host += model_.message_launch;
        return rank.in_free;
    }

    replay::MaxPlusMatrix passage_of(int r, const plan::Turn& turn) const {
        const ChunkModel& model = chunk(r, turn.chunk);
        if (turn.forward()) return model.forward;
        const int left = ranks_[static_cast<std::size_t>(r)].backwards_left[static_cast<std::size_t>(turn.chunk)];
        const replay::MaxPlusMatrix& backward = left == micro_batches_ ? model.first_backward : model.backward;
        return left > 1 ? backward : reducing(model, backward);
    }
    // The last backward also issues reductions, each behind the op that finishes its gradients.
    replay::MaxPlusMatrix reducing(const ChunkModel& model, replay::MaxPlusMatrix max_plus) const {
        for (const BucketTime& bucket : model.buckets) {
            if (bucket[passes::StepWork::reduce] == 0.0) continue;
            max_plus.from_host.host += model_.step_launch;
            max_plus.from_device.host += model_.step_launch;
            max_plus.from_message.host += model_.step_launch;
            if (bucket.until_final.from_device.device < max_plus.from_device.device)
                max_plus.from_host.device += model_.step_launch;
        }
        return max_plus;
    }

    void single(int r, const plan::Turn& turn, double arrived) {
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        const replay::MaxPlusMatrix max_plus = passage_of(r, turn);
        const double message = receive(r, turn, arrived);
        const replay::StreamClocks before = rank.clocks;
        rank.clocks = max_plus.after(before, message);
        const replay::StreamClocks ahead =
            max_plus.after({replay::MaxPlusMatrix::never, before.device, before.ring}, message);
        rank.play.host += rank.clocks.device - ahead.device;
        finish_slot(r, turn, before, message, max_plus.from_device.device);
        ++rank.next;
    }
    // Seconds of a slot's work before its message is needed.
    static double unaided(const replay::MaxPlusMatrix& max_plus) {
        return max_plus.from_device.device - max_plus.from_message.device;
    }

    // Both lanes in one: what they save together shrinks when one of them starts late.
    void pair(int r, const plan::Turn& a, double arrived_a, const plan::Turn& b, double arrived_b) {
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        const replay::MaxPlusMatrix slot_a = passage_of(r, a), slot_b = passage_of(r, b);
        const double alone_a = slot_a.from_device.device, alone_b = slot_b.from_device.device;
        // The first backward sets gradients; pairs are priced as those that add to them.
        const double sooner = std::max(0.0, chunk(r, b.chunk).backward.from_device.device - alone_b);
        const auto begin = [&](const plan::Turn& turn, double arrived, const replay::MaxPlusMatrix& slot) {
            const double message = receive(r, turn, arrived);
            return std::max({rank.clocks.device, message - unaided(slot), rank.clocks.host});
        };
        // Ops that run in a given order begin with the backward's.
        const bool in_order = replay::runs_in_arena(plan_);
        double start_a = 0.0, start_b = 0.0;
        if (in_order) start_b = begin(b, arrived_b, slot_b);
        start_a = begin(a, arrived_a, slot_a);
        if (!in_order) start_b = begin(b, arrived_b, slot_b);
        const MergedTime& merged = merged_of(r, a, b);
        const double early = std::min(start_a, start_b), late = std::max(start_a, start_b);
        // A host that waits for counts on the way issues little while messages have yet to come.
        const double lead =
            std::max(0.0, (merged.waits ? std::min(early, rank.clocks.device) : early) - rank.clocks.host);
        const double both = std::max(merged.ahead, merged.together - lead) - sooner;
        const double first = start_a <= start_b ? alone_a : alone_b, apart = alone_a + alone_b, other = apart - first;
        // They wait for the lane that begins late; what the backward has before its layers does not wait for the
        // forward.
        const double share = in_order ? 1.0 : first > 0.0 ? std::max(0.0, 1.0 - (late - early) / first) : 0.0;
        const double end = in_order ? std::max(start_b, start_a - merged.forward_start) + both
                                    : std::max(early + apart - (apart - both) * share, late + other);
        rank.play.saved += std::max(0.0, apart - (end - late) - std::min(late - early, first));
        rank.play.host += both + sooner - merged.ahead;
        // Between both extremes: a lane that is through before the other begins, and lanes that begin together.
        const auto sent = [&](double start, double alone, double merged_end) {
            if (!in_order && start == early && late > early) return start + alone + share * (merged_end - alone);
            return end - share * (merged.ahead - merged_end);
        };
        const double sent_a = sent(start_a, alone_a, merged.forward_end);
        const double sent_b = sent(start_b, alone_b, merged.backward_end);
        // Alone either lane's host waits for counts beside nothing; in a pair it issues the other lane meanwhile.
        rank.clocks.host += merged.issue;
        if (merged.waits) rank.clocks.host = std::max(rank.clocks.host, end - merged.lead_after);
        rank.clocks.device = rank.clocks.ring = end;
        const double late_a = wait_for_data(r, a), late_b = wait_for_data(r, b);
        const double slower =
            slow_down(model_, rank, both, std::max(chunk(r, a.chunk).computes[0], chunk(r, b.chunk).computes[1]));
        // They share a line out: the message that is there first leaves first.
        const double ready_a = sent_a + late_a + slower, ready_b = sent_b + late_b + slower;
        if (ready_a <= ready_b) send(r, a, ready_a);
        send(r, b, ready_b);
        if (ready_a > ready_b) send(r, a, ready_a);
        rank.next += 2;
    }

    const MergedTime& merged_of(int r, const plan::Turn& a, const plan::Turn& b) const {
        const std::vector<int>& chunks = model_.ranks[static_cast<std::size_t>(r)];
        const auto index = [&chunks](const plan::Turn& turn) {
            return static_cast<std::size_t>(chunks[static_cast<std::size_t>(turn.chunk)]);
        };
        return model_.merged[index(a) * model_.chunks.size() + index(b)];
    }

    // Waits for weights in the first forward, reduces gradients in the last backward, and sends to the neighbour.
    // Merged pairs hold neither the first forward nor the last backward of a chunk (see order()).
    // `seconds`: that it computes.
    void finish_slot(int r, const plan::Turn& turn, const replay::StreamClocks& before, double message,
                     double seconds) {
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        const auto c = static_cast<std::size_t>(turn.chunk);
        const double computes = chunk(r, turn.chunk).computes[turn.forward() ? 0 : 1];
        if (turn.forward()) {
            slow_down(model_, rank, seconds, computes);
            wait_for_data(r, turn, model_.lost * computes);
            return send(r, turn, rank.clocks.device);
        }
        const double waited = wait_for_data(r, turn);
        const double end = rank.clocks.device, start = end - seconds;
        if (rank.backwards_left[c] == 0) {
            const ChunkModel& model = chunk(r, turn.chunk);
            for (const std::size_t i : model.reductions) {
                const BucketTime& bucket = model.buckets[i];
                const double reduce = bucket[passes::StepWork::reduce];
                if (reduce == 0.0) continue;
                double ready = std::min(bucket.until_final.after(before, message).device + waited, end);
                // The gradients of other buckets are reduced beside what comes before.
                ready += replay::slowed(rank.collectives, model_.lost * computes, start, ready - start);
                rank.data_free = std::max(rank.data_free, ready) + reduce;
                rank.collectives.emplace_back(rank.data_free - reduce, rank.data_free);
            }
        }
        slow_down(model_, rank, seconds, computes);
        send(r, turn, rank.clocks.device);
    }
    // Seconds by which missing weights or gradients that are still being zeroed hold up the first slot of a chunk,
    // which loses the part `lost` of its rate beside what is still gathered behind them.
    double wait_for_data(int r, const plan::Turn& turn, double lost = 0.0) {
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        const auto c = static_cast<std::size_t>(turn.chunk);
        const double end = rank.clocks.device;
        if ((turn.forward() ? rank.forwards_left : rank.backwards_left)[c]-- < micro_batches_) return 0.0;
        const auto wait = [&](double there, const replay::StreamClocks& after) {
            if (there + after.device / (1.0 - lost) > rank.clocks.device)
                there += replay::slowed(rank.collectives, lost, there, after.device);
            rank.clocks = replay::latest(rank.clocks, {there + after.host, there + after.device, there + after.ring});
        };
        const std::vector<BucketTime>& buckets = chunk(r, turn.chunk).buckets;
        for (std::size_t i = 0; i < buckets.size(); ++i)
            turn.forward() ? wait(rank.gathered[rank.first_bucket[c] + i], buckets[i].after_weights)
                           : wait(rank.zeroed[rank.first_bucket[c] + i], buckets[i].after_zero);
        if (turn.forward()) wait(rank.quantized, chunk(r, turn.chunk).after_scales);
        rank.play.data += rank.clocks.device - end;
        return rank.clocks.device - end;
    }
    // Sends a message that is there at `ready` when the host has come to it.
    void send(int r, const plan::Turn& turn, double ready) {
        const int stage = turn.chunk * plan_.pp + r;
        const int to = turn.forward() ? stage + 1 : stage - 1;
        if (to < 0 || to >= stages_) return;
        RankState& rank = ranks_[static_cast<std::size_t>(r)];
        rank.out_free = std::max({rank.out_free, ready, rank.clocks.host}) + model_.message;
        rank.clocks.host += model_.message_launch;
        (turn.forward() ? forward_ : backward_)[at(to, turn.micro_batch)] = rank.out_free;
    }

    const plan::Plan& plan_;
    const StepModel& model_;
    int micro_batches_, stages_;
    std::vector<double> forward_, backward_; // seconds of arrival at (stage, micro-batch)
    std::vector<RankState> ranks_;
};

} // namespace

std::vector<RankPlay> play_step(const plan::Plan& plan, const StepModel& model, Orders& orders, int micro_batches) {
    return Pipeline(plan, model, orders, micro_batches).play();
}

} // namespace moe::estimate
