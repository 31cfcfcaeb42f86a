// Plays the slots of all pipeline ranks against each other: a recurrence over the schedule, without any ops.
#include "simulator/step_model.hpp"

#include "planner/error.hpp"

#include <algorithm>

namespace moe {

const Orders::Order& Orders::of(const Plan& plan, int micro_batches, int rank) {
    const std::array<int, 6> key{static_cast<int>(plan.schedule), plan.pp, plan.vpp, micro_batches, rank,
                                 plan.ep_overlap ? 1 : 0};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = orders_.find(key);
        if (it != orders_.end()) return *it->second;
    }
    auto result = std::make_unique<Order>();
    result->turns = order(plan.schedule, plan.pp, plan.vpp, micro_batches, rank, plan.ep_overlap);
    result->kept = kept_together(result->turns, plan.vpp, plan.ep_overlap);
    const std::lock_guard<std::mutex> lock(mutex_);
    return *orders_.emplace(key, std::move(result)).first->second;
}

namespace {

class Pipeline {
public:
    Pipeline(const Plan& plan, const StepModel& model, Orders& orders, int micro_batches)
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
            begin(rank, r);
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
        const std::vector<Turn>* turns = nullptr;
        std::size_t next = 0;
        double free = 0.0, host = 0.0, in_free = 0.0, out_free = 0.0, data_free = 0.0;
        std::vector<std::vector<double>> gathered, zeroed; // [chunk][bucket]: when
        std::vector<int> backwards_left, forwards_left;
        RankPlay play;
    };
    struct Lane {
        const Turn* turn = nullptr;
        double ready = 0.0;   // when its message is there
        double seconds = 0.0; // alone
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
    void begin(Rank& rank, int r) {
        double gathered = 0.0, zeroed = 0.0;
        for (int c = 0; c < plan_.vpp; ++c) {
            rank.gathered.emplace_back();
            for (const BucketTime& bucket : chunk(r, c).buckets) {
                gathered += bucket.gather;
                if (!bucket.late_zero) zeroed += bucket.zero;
                rank.gathered.back().push_back(gathered);
            }
        }
        for (int c = 0; c < plan_.vpp; ++c) {
            rank.zeroed.emplace_back();
            for (const BucketTime& bucket : chunk(r, c).buckets)
                rank.zeroed.back().push_back(bucket.late_zero ? gathered += bucket.zero : 0.0);
        }
        rank.data_free = gathered;
        rank.free = zeroed;
        rank.play.data = zeroed;
    }

    // When the message of a turn arrives; negative while it has not been sent.
    double arrival(int r, const Turn& turn) const {
        const int stage = turn.chunk * plan_.pp + r;
        if (turn.forward) return stage == 0 ? 0.0 : forward_[at(stage, turn.micro_batch)];
        return stage == stages_ - 1 ? 0.0 : backward_[at(stage, turn.micro_batch)];
    }

    bool advance(int r, bool guess) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        if (rank.next == rank.turns->size()) return false;
        const Turn& turn = (*rank.turns)[rank.next];
        const double first = arrival(r, turn);
        if (plan_.ep_overlap && turn.forward && rank.next + 1 < rank.turns->size()) {
            const Turn& other = (*rank.turns)[rank.next + 1];
            if (!other.forward && (other.chunk != turn.chunk || other.micro_batch != turn.micro_batch)) {
                const double second = arrival(r, other);
                if (first >= 0.0 && second >= 0.0) {
                    pair(r, turn, first, other, second);
                    return true;
                }
                if (!guess || first < 0.0) return false;
            }
        }
        if (first < 0.0) return false;
        single(r, turn, first);
        return true;
    }

    // Messages are received one after another in the order of the slots (a pair's forward first), early ones behind
    // late ones.
    double receive(int r, const Turn& turn, double arrived) {
        const int stage = turn.chunk * plan_.pp + r;
        if (turn.forward ? stage == 0 : stage == stages_ - 1) return 0.0;
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        return rank.in_free = std::max(rank.in_free, arrived);
    }

    double seconds(Rank& rank, const SlotTime& slot, double start) const {
        return std::max(slot.ahead, slot.together - (start - rank.host));
    }
    void issue(Rank& rank, const SlotTime& slot, double end) const {
        rank.host = slot.waits ? end - slot.lead_after : rank.host + slot.host;
    }
    const SlotTime& slot_of(int r, const Turn& turn) const {
        return turn.forward ? chunk(r, turn.chunk).forward : chunk(r, turn.chunk).backward;
    }

    void single(int r, const Turn& turn, double arrived) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const SlotTime& slot = slot_of(r, turn);
        const double start = std::max({rank.free, receive(r, turn, arrived) - slot.unaided, rank.host});
        const double spent = seconds(rank, slot, start);
        rank.play.host += spent - slot.ahead;
        const double end = finish_slot(r, turn, start, start + spent, start + spent);
        issue(rank, slot, end);
        rank.free = end;
        ++rank.next;
    }

    // Both lanes in one: what they save together shrinks when one of them starts late.
    void pair(int r, const Turn& a, double arrived_a, const Turn& b, double arrived_b) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const SlotTime &slot_a = slot_of(r, a), &slot_b = slot_of(r, b);
        const double start_a = std::max({rank.free, receive(r, a, arrived_a) - slot_a.unaided, rank.host});
        const double start_b = std::max({rank.free, receive(r, b, arrived_b) - slot_b.unaided, rank.host});
        const MergedTime& merged = merged_of(r, a, b);
        const double early = std::min(start_a, start_b), late = std::max(start_a, start_b);
        const double both = std::max(merged.ahead, merged.together - (early - rank.host));
        const double first = start_a <= start_b ? slot_a.ahead : slot_b.ahead;
        const double apart = slot_a.ahead + slot_b.ahead, other = apart - first;
        const double share = first > 0.0 ? std::max(0.0, 1.0 - (late - early) / first) : 0.0;
        const double end = std::max(early + apart - (apart - both) * share, late + other);
        rank.play.saved += std::max(0.0, apart - (end - late) - std::min(late - early, first));
        rank.play.host += both - merged.ahead;
        // Between both extremes: a lane that is through before the other begins, and lanes that begin together.
        const auto sent = [&](double start, double alone, double merged_end) {
            if (start == early && late > early) return start + alone + share * (merged_end - alone);
            return end - share * (merged.ahead - merged_end);
        };
        const double sent_a = sent(start_a, slot_a.ahead, merged.forward_end);
        const double sent_b = sent(start_b, slot_b.ahead, merged.backward_end);
        finish_slot(r, a, start_a, end, sent_a);
        finish_slot(r, b, start_b, end, sent_b);
        rank.host = merged.waits ? end - merged.lead_after : rank.host + slot_a.host + slot_b.host;
        rank.free = end;
        rank.next += 2;
    }

    const MergedTime& merged_of(int r, const Turn& a, const Turn& b) const {
        const std::vector<int>& chunks = model_.ranks[static_cast<std::size_t>(r)];
        const auto index = [&chunks](const Turn& turn) {
            return static_cast<std::size_t>(chunks[static_cast<std::size_t>(turn.chunk)]);
        };
        return model_.merged[index(a) * model_.chunks.size() + index(b)];
    }

    // Waits for weights in the first forward, reduces gradients in the last backward, sends to the neighbour what is
    // there at `sent`. Merged pairs hold neither the first forward nor the last backward of a chunk (see order()).
    double finish_slot(int r, const Turn& turn, double start, double end, double sent) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        const auto c = static_cast<std::size_t>(turn.chunk);
        const ChunkModel& model = chunk(r, turn.chunk);
        const std::vector<BucketTime>& buckets = model.buckets;
        const double before = end;
        if (turn.forward && rank.forwards_left[c]-- == micro_batches_)
            for (std::size_t i = 0; i < buckets.size(); ++i)
                end = std::max(end, rank.gathered[c][i] + buckets[i].after_read);
        if (!turn.forward && rank.backwards_left[c] == micro_batches_)
            for (std::size_t i = 0; i < buckets.size(); ++i)
                end = std::max(end, rank.zeroed[c][i] + buckets[i].after_written);
        rank.play.data += end - before;
        sent += end - before;
        if (!turn.forward && --rank.backwards_left[c] == 0) {
            // A late host stretches the backward evenly.
            const double stretch = model.backward.ahead > 0.0 ? (end - start) / model.backward.ahead : 1.0;
            for (const std::size_t i : model.reductions) {
                const double ready = end - buckets[i].after_final * stretch;
                rank.data_free = std::max(rank.data_free, ready) + buckets[i].reduce;
            }
        }
        const int stage = turn.chunk * plan_.pp + r;
        const int to = turn.forward ? stage + 1 : stage - 1;
        if (to >= 0 && to < stages_) {
            rank.out_free = std::max(rank.out_free, sent) + model_.message;
            (turn.forward ? forward_ : backward_)[at(to, turn.micro_batch)] = rank.out_free;
        }
        return end;
    }

    // When each rank's gradient of the embedding table holds its copies' as well; 0 where there is nothing to add.
    std::vector<double> add_tables() const {
        std::vector<double> done(ranks_.size(), 0.0);
        const std::size_t n = model_.table_holders.size();
        if (n < 2) return done;
        std::vector<double> sent(n), added(n);
        for (std::size_t i = 0; i < n; ++i) {
            const Rank& rank = ranks_[static_cast<std::size_t>(model_.table_holders[i])];
            sent[i] = added[i] = std::max(rank.free, rank.data_free);
        }
        for (std::size_t step = 0; step + 1 < n; ++step) {
            std::vector<double> arrived(n);
            for (std::size_t i = 0; i < n; ++i) {
                arrived[(i + 1) % n] = sent[i] + model_.table_message;
            }
            for (std::size_t i = 0; i < n; ++i) added[i] = std::max(added[i], arrived[i]) + model_.table_add;
            sent = arrived;
        }
        for (std::size_t i = 0; i < n; ++i) done[static_cast<std::size_t>(model_.table_holders[i])] = added[i];
        return done;
    }

    // Norm over all ranks, then the optimizer.
    std::vector<RankPlay> finish() {
        double meet = 0.0;
        std::vector<double> last;
        std::vector<double> tables = add_tables();
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            Rank& rank = ranks_[r];
            last.push_back(rank.free);
            double squares = 0.0;
            for (const int c : model_.ranks[r])
                for (const BucketTime& bucket : model_.chunks[static_cast<std::size_t>(c)].buckets)
                    squares += bucket.squares;
            rank.play.data += std::max(0.0, rank.data_free - rank.free);
            const double added = std::max(0.0, tables[r] - std::max(rank.free, rank.data_free));
            rank.play.data += added;
            rank.free = std::max(rank.free, rank.data_free) + added + squares;
            rank.play.optimizer += squares + model_.norm;
            meet = std::max(meet, rank.free);
        }
        std::vector<RankPlay> plays;
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            // Offloaded states come from the host bucket by bucket, and go back behind their update.
            double copied = meet + model_.norm, updated = copied;
            std::vector<double> there;
            for (const int c : model_.ranks[r])
                for (const BucketTime& bucket : model_.chunks[static_cast<std::size_t>(c)].buckets)
                    there.push_back(copied += bucket.reload);
            std::size_t next = 0;
            for (const int c : model_.ranks[r])
                for (const BucketTime& bucket : model_.chunks[static_cast<std::size_t>(c)].buckets) {
                    updated = std::max(updated, there[next++]) + bucket.update;
                    if (bucket.store > 0.0) copied = std::max(copied, updated) + bucket.store;
                }
            RankPlay play = ranks_[r].play;
            play.end = std::max(updated, copied);
            play.optimizer += play.end - meet - model_.norm;
            play.issued = ranks_[r].host;
            play.closing = play.end - last[r];
            plays.push_back(play);
        }
        return plays;
    }

    const Plan& plan_;
    const StepModel& model_;
    int micro_batches_, stages_;
    std::vector<double> forward_, backward_; // arrival at (stage, micro-batch)
    std::vector<Rank> ranks_;
};

} // namespace

std::vector<RankPlay> play_step(const Plan& plan, const StepModel& model, Orders& orders, int micro_batches) {
    return Pipeline(plan, model, orders, micro_batches).play();
}

} // namespace moe
