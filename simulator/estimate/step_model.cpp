// Plays the slots of all pipeline ranks against each other: a recurrence over the schedule, without any ops.
#include "simulator/estimate/step_model.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "simulator/replay/contention.hpp"
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
            Rank rank;
            rank.turns = &orders.of(plan, micro_batches, r).turns;
            rank.backwards_left.assign(static_cast<std::size_t>(plan.vpp), micro_batches);
            rank.forwards_left = rank.backwards_left;
            for (int c = 0; c < plan.vpp; ++c) {
                rank.first_bucket.push_back(rank.buckets.size());
                for (const BucketTime& bucket : chunk(r, c).buckets) rank.buckets.push_back(&bucket);
            }
            begin(rank);
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
        return finish();
    }

private:
    struct Rank {
        const std::vector<plan::Turn>* turns = nullptr;
        std::size_t next = 0;
        replay::StreamClocks clocks;
        double in_free = 0.0, out_free = 0.0, data_free = 0.0;
        std::vector<const BucketTime*> buckets; // buckets of its chunks in order
        std::vector<std::size_t> first_bucket;  // first bucket by chunk
        std::vector<double> gathered, zeroed;   // seconds at which each bucket is there
        replay::CommIntervals collectives;      // communication beside what computes
        std::vector<int> backwards_left, forwards_left;
        RankPlay play;
    };

    bool done() const {
        return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.next == r.turns->size(); });
    }
    const ChunkModel& chunk(int r, int c) const {
        return model_
            .chunks[static_cast<std::size_t>(model_.ranks[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)])];
    }
    std::size_t at(int stage, int micro_batch) const {
        return static_cast<std::size_t>(stage) * static_cast<std::size_t>(micro_batches_) +
               static_cast<std::size_t>(micro_batch);
    }

    // Weights are gathered one bucket after another while the first forward already runs; gradients are zeroed.
    void begin(Rank& rank) const {
        double gathered = 0.0, zeroed = 0.0;
        const auto run = [&](double& stream, double seconds) {
            stream = std::max(stream, rank.clocks.host) + seconds;
            rank.clocks.host += model_.step_launch;
        };
        const auto travel = [&](double& stream, double seconds) {
            run(stream, seconds);
            rank.collectives.emplace_back(stream - seconds, stream);
        };
        rank.gathered.resize(rank.buckets.size());
        rank.zeroed.resize(rank.buckets.size());
        const bool sets = passes::sets_first_gradients(plan_);
        const auto early_zero = [&](std::size_t i) { return sets && rank.buckets[i]->staged; };
        passes::each_begin_op(rank.buckets.size(), early_zero, [&](std::size_t i, passes::StepWork work) {
            const BucketTime& bucket = *rank.buckets[i];
            const bool zeroes = work == passes::StepWork::zero;
            double& stream = zeroes && !bucket.staged ? zeroed : gathered;
            if (bucket[work] > 0.0)
                work == passes::StepWork::gather ? travel(stream, bucket[work]) : run(stream, bucket[work]);
            if (!zeroes || early_zero(i)) rank.gathered[i] = gathered;
            if (zeroes) rank.zeroed[i] = bucket.staged ? gathered : 0.0;
            if (zeroes && !bucket.staged) rank.play.data += bucket[work];
        });
        rank.data_free = gathered;
        rank.clocks.device = rank.clocks.ring = zeroed;
    }

    // The time when the message of a turn arrives; negative while it has not been sent.
    double arrival(int r, const plan::Turn& turn) const {
        const int stage = turn.chunk * plan_.pp + r;
        if (turn.forward()) return stage == 0 ? 0.0 : forward_[at(stage, turn.micro_batch)];
        return stage == stages_ - 1 ? 0.0 : backward_[at(stage, turn.micro_batch)];
    }

    bool advance(int r, bool guess) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
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
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
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
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
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
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const replay::MaxPlusMatrix slot_a = passage_of(r, a), slot_b = passage_of(r, b);
        const double alone_a = slot_a.from_device.device, alone_b = slot_b.from_device.device;
        // The first backward sets gradients; pairs are priced as those that add to them.
        const double sooner = std::max(0.0, chunk(r, b.chunk).backward.from_device.device - alone_b);
        const auto begin = [&](const plan::Turn& turn, double arrived, const replay::MaxPlusMatrix& slot) {
            const double message = receive(r, turn, arrived);
            return std::max({rank.clocks.device, message - unaided(slot), rank.clocks.host});
        };
        const double start_a = begin(a, arrived_a, slot_a), start_b = begin(b, arrived_b, slot_b);
        const MergedTime& merged = merged_of(r, a, b);
        const double early = std::min(start_a, start_b), late = std::max(start_a, start_b);
        // A host that waits for counts on the way issues little while messages have yet to come.
        const double lead =
            std::max(0.0, (merged.waits ? std::min(early, rank.clocks.device) : early) - rank.clocks.host);
        const double both = std::max(merged.ahead, merged.together - lead) - sooner;
        const double first = start_a <= start_b ? alone_a : alone_b, apart = alone_a + alone_b, other = apart - first;
        // Ops that run in a given order wait for the lane that begins late; what the backward has before its layers
        // does not wait for the forward.
        const bool in_order = replay::runs_in_arena(plan_);
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
            slow_down(rank, both, std::max(chunk(r, a.chunk).computes[0], chunk(r, b.chunk).computes[1]));
        send(r, a, sent_a + late_a + slower);
        send(r, b, sent_b + late_b + slower);
        rank.next += 2;
    }

    const MergedTime& merged_of(int r, const plan::Turn& a, const plan::Turn& b) const {
        const std::vector<int>& chunks = model_.ranks[static_cast<std::size_t>(r)];
        const auto index = [&chunks](const plan::Turn& turn) {
            return static_cast<std::size_t>(chunks[static_cast<std::size_t>(turn.chunk)]);
        };
        return model_.merged[index(a) * model_.chunks.size() + index(b)];
    }

    // Puts off a rank's clock where collectives are beside the `seconds` until now, of which it has computed for that
    // part; by how much.
    double slow_down(Rank& rank, double seconds, double computes) const {
        if (model_.lost == 0.0) return 0.0;
        const double start = rank.clocks.device - seconds;
        while (!rank.collectives.empty() && rank.collectives.front().second <= start) rank.collectives.pop_front();
        const double longer = replay::slowed(rank.collectives, model_.lost * computes, start, seconds);
        rank.clocks.device += longer;
        rank.clocks.ring += longer;
        return longer;
    }

    // Waits for weights in the first forward, reduces gradients in the last backward, and sends to the neighbour.
    // Merged pairs hold neither the first forward nor the last backward of a chunk (see order()).
    // `seconds`: that it computes.
    void finish_slot(int r, const plan::Turn& turn, const replay::StreamClocks& before, double message,
                     double seconds) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const auto c = static_cast<std::size_t>(turn.chunk);
        const double waited = wait_for_data(r, turn);
        const double end = rank.clocks.device, start = end - seconds;
        const double computes = chunk(r, turn.chunk).computes[turn.forward() ? 0 : 1];
        if (!turn.forward() && rank.backwards_left[c] == 0) {
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
        slow_down(rank, seconds, computes);
        send(r, turn, rank.clocks.device);
    }
    // Seconds by which missing weights or gradients that are still being zeroed hold up the first slot of a chunk.
    double wait_for_data(int r, const plan::Turn& turn) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const auto c = static_cast<std::size_t>(turn.chunk);
        const double end = rank.clocks.device;
        if ((turn.forward() ? rank.forwards_left : rank.backwards_left)[c]-- < micro_batches_) return 0.0;
        const std::vector<BucketTime>& buckets = chunk(r, turn.chunk).buckets;
        for (std::size_t i = 0; i < buckets.size(); ++i) {
            const double there = (turn.forward() ? rank.gathered : rank.zeroed)[rank.first_bucket[c] + i];
            const replay::StreamClocks& after = turn.forward() ? buckets[i].after_weights : buckets[i].after_zero;
            rank.clocks = replay::latest(rank.clocks, {there + after.host, there + after.device, there + after.ring});
        }
        rank.play.data += rank.clocks.device - end;
        return rank.clocks.device - end;
    }
    // Sends a message that is there at `ready` when the host has come to it.
    void send(int r, const plan::Turn& turn, double ready) {
        const int stage = turn.chunk * plan_.pp + r;
        const int to = turn.forward() ? stage + 1 : stage - 1;
        if (to < 0 || to >= stages_) return;
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        rank.out_free = std::max({rank.out_free, ready, rank.clocks.host}) + model_.message;
        rank.clocks.host += model_.message_launch;
        (turn.forward() ? forward_ : backward_)[at(to, turn.micro_batch)] = rank.out_free;
    }

    // The times when each rank's gradient of the embedding table holds its copies' as well; 0 where there is nothing to
    // add.
    std::vector<double> add_tables() {
        std::vector<double> done(ranks_.size(), 0.0);
        const std::size_t n = model_.table_holders.size();
        if (n < 2) return done;
        const auto holder = [this](std::size_t i) -> Rank& {
            return ranks_[static_cast<std::size_t>(model_.table_holders[i])];
        };
        std::vector<double> here(n), added(n), arrived(n);
        for (std::size_t i = 0; i < n; ++i) here[i] = added[i] = std::max(holder(i).clocks.device, holder(i).data_free);
        for (std::size_t step = 0; step + 1 < n; ++step) {
            for (std::size_t i = 0; i < n; ++i)
                arrived[(i + 1) % n] = std::max(here[i], holder(i).clocks.host) + model_.table_message;
            for (std::size_t i = 0; i < n; ++i) {
                holder(i).clocks.host += 3.0 * model_.step_launch; // launches of the send, receive and add
                added[i] =
                    std::max({added[i], arrived[i], holder(i).clocks.host - model_.step_launch}) + model_.table_add;
            }
            here = arrived;
        }
        for (std::size_t i = 0; i < n; ++i) done[static_cast<std::size_t>(model_.table_holders[i])] = added[i];
        return done;
    }

    // Norm over all ranks, then the optimizer.
    std::vector<RankPlay> finish() {
        double meet = 0.0;
        std::vector<double> last;
        for (Rank& rank : ranks_) rank.play.issued = rank.clocks.host;
        const std::vector<double> tables = add_tables();
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            Rank& rank = ranks_[r];
            last.push_back(rank.clocks.device);
            const double added = std::max(0.0, tables[r] - std::max(rank.clocks.device, rank.data_free));
            const bool loss = r + 1 == ranks_.size();
            if (loss && plan_.dp * plan_.cp > 1) rank.clocks.host += model_.step_launch;
            rank.play.data += std::max(0.0, rank.data_free - rank.clocks.device) + added;
            rank.clocks.device = std::max(rank.clocks.device, rank.data_free) + added;
            passes::each_op_before_norm(rank.buckets.size(), [&](std::size_t i, passes::StepWork work) {
                optimize(rank, 0.0, (*rank.buckets[i])[work]);
            });
            rank.play.optimizer += model_.norm;
            meet = std::max({meet, rank.clocks.device, rank.clocks.host});
        }
        std::vector<RankPlay> plays;
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            Rank& rank = ranks_[r];
            rank.clocks.device = meet + model_.norm;
            if (plan_.gpus > 1) rank.clocks.host += model_.step_launch;
            update(rank);
            rank.play.end = rank.clocks.device;
            rank.play.closing = rank.play.end - last[r];
            plays.push_back(rank.play);
        }
        return plays;
    }
    // An op of the optimizer that needs something that is there at `ready`.
    void optimize(Rank& rank, double ready, double seconds) const {
        const double start = std::max(rank.clocks.device, ready), late = std::max(0.0, rank.clocks.host - start);
        rank.play.host += late;
        rank.play.optimizer += start + seconds - rank.clocks.device;
        rank.clocks.device = start + late + seconds;
        rank.clocks.host += model_.step_launch;
    }
    // Offloaded states come from the host bucket by bucket, and go back behind their update. What computes is slowed by
    // Muon's updates on their way beside it.
    void update(Rank& rank) const {
        double copied = rank.clocks.device, spread = copied;
        const auto travel = [&](double& stream, double ready, double seconds) {
            if (seconds == 0.0) return;
            stream = std::max({stream, ready, rank.clocks.host}) + seconds;
            rank.clocks.host += model_.step_launch;
        };
        std::vector<double> there(rank.buckets.size());
        const auto is_muon = [&](std::size_t i) { return rank.buckets[i]->muon; };
        passes::each_op_behind_norm(rank.buckets.size(), is_muon, [&](std::size_t i, passes::StepWork work) {
            const double seconds = (*rank.buckets[i])[work];
            if (work == passes::StepWork::fetch || work == passes::StepWork::store) {
                travel(copied, work == passes::StepWork::fetch ? copied : rank.clocks.device, seconds);
                if (work == passes::StepWork::fetch) there[i] = copied;
            } else if (work == passes::StepWork::spread && seconds > 0.0) {
                travel(spread, rank.clocks.device, seconds);
                rank.collectives.emplace_back(spread - seconds, spread);
                there[i] = spread;
            } else if (work == passes::StepWork::update || seconds > 0.0) {
                optimize(rank, there[i], seconds);
                if (work != passes::StepWork::join) rank.play.optimizer += slow_down(rank, seconds, 1.0);
            }
        });
        rank.play.optimizer += std::max(0.0, copied - rank.clocks.device);
        rank.clocks.device = std::max(rank.clocks.device, copied);
    }

    const plan::Plan& plan_;
    const StepModel& model_;
    int micro_batches_, stages_;
    std::vector<double> forward_, backward_; // seconds of arrival at (stage, micro-batch)
    std::vector<Rank> ranks_;
};

} // namespace

std::vector<RankPlay> play_step(const plan::Plan& plan, const StepModel& model, Orders& orders, int micro_batches) {
    return Pipeline(plan, model, orders, micro_batches).play();
}

} // namespace moe::estimate
