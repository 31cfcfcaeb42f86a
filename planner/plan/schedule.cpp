// Pipeline schedules: the order in which a pipeline rank runs the forward and backward slots of its model chunks.
#include "planner/plan/schedule.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/split_orders.hpp"

#include <algorithm>

namespace moe::plan {
namespace {

// Chunk and micro-batch of the k-th forward (or backward) slot of a rank: groups of `pp` micro-batches pass through one
// chunk after the other, the backward through the chunks in reverse. With vpp = 1 this is simply micro-batch k.
Turn turn(bool forward, int k, int pp, int vpp) {
    const int group = k / (pp * vpp);
    const int within = k % (pp * vpp);
    const int chunk = within / pp;
    return {forward ? SlotKind::forward : SlotKind::backward, forward ? chunk : vpp - 1 - chunk,
            group * pp + within % pp};
}

void check(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank) {
    if (pp < 1 || vpp < 1 || micro_batches < 1)
        refuse("schedule: pp {}, vpp {}, micro-batches {}: each must be 1 or more", pp, vpp, micro_batches);
    if (rank < 0 || rank >= pp) refuse("schedule: pipeline rank {} is outside 0 to {}", rank, pp - 1);
    if (kind == ScheduleKind::one_f_one_b && vpp != 1)
        refuse("schedule 1f1b: runs one chunk per rank, vpp is {}: use the interleaved schedule or vpp 1", vpp);
    if (kind == ScheduleKind::interleaved && micro_batches % pp != 0)
        refuse("schedule interleaved: micro-batches = {} is not a multiple of pp {}: change gbs, mbs or dp",
               micro_batches, pp);
    const int chunks = in_a_v(kind) ? 2 : 1;
    if (splits_backward(kind) && (pp < 2 || vpp != chunks || micro_batches < chunks * pp))
        refuse("schedule {}: needs pp > 1, vpp {} and {} micro-batches or more, but pp is {}, vpp {}, micro-batches {}",
               to_string(kind), chunks, chunks * pp, pp, vpp, micro_batches);
}

// Marks every forward from `first` on whose next turn is a whole backward of something else.
void merge_pairs(std::vector<Turn>& turns, std::size_t first) {
    for (std::size_t i = first; i + 1 < turns.size(); ++i) {
        const Turn &forward = turns[i], &next = turns[i + 1];
        turns[i].merged = forward.forward() && next.kind == SlotKind::backward &&
                          (forward.chunk != next.chunk || forward.micro_batch != next.micro_batch);
    }
}

} // namespace

// Source: Megatron-LM pipeline_parallel/schedules.py. EP overlap merges a forward with the backward of another
// micro-batch, which takes one more in flight. Messages of a pair leave at its end, to the next rank as well as to the
// one before, and with one warm-up forward per rank behind both would wait for each other all the time: it takes two,
// as the interleaved order has them.
int warm_up_forwards(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank, bool ep_overlap) {
    const int behind = pp - rank - 1;
    const int warm_up = kind == ScheduleKind::one_f_one_b && !ep_overlap ? behind : 2 * behind + (vpp - 1) * pp;
    return std::min(warm_up + (ep_overlap ? 1 : 0), micro_batches * vpp);
}

std::vector<Turn> order(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank, bool ep_overlap) {
    check(kind, pp, vpp, micro_batches, rank);
    if (splits_backward(kind)) {
        std::vector<Turn> turns = split_order(kind, pp, micro_batches, rank);
        if (ep_overlap) merge_pairs(turns, 0);
        return turns;
    }
    const int total = micro_batches * vpp;
    const int warm_up = warm_up_forwards(kind, pp, vpp, micro_batches, rank, ep_overlap);

    // 1F1B is counted in micro-batches without groups: with pp = 1 in turn() a group is one micro-batch.
    const int group = kind == ScheduleKind::one_f_one_b ? 1 : pp;
    std::vector<Turn> turns;
    turns.reserve(2 * static_cast<std::size_t>(total));
    int forward = 0;
    while (forward < warm_up) turns.push_back(turn(true, forward++, group, vpp));
    for (int backward = 0; backward < total; ++backward) {
        if (forward < total) turns.push_back(turn(true, forward++, group, vpp));
        turns.push_back(turn(false, backward, group, vpp));
    }
    if (ep_overlap) merge_pairs(turns, static_cast<std::size_t>(warm_up));
    return turns;
}

namespace {

// The change in the micro-batches that a chunk keeps.
int change(const Turn& turn) { return turn.forward() ? 1 : turn.last() ? -1 : 0; }

} // namespace

const char* to_string(SlotKind kind) {
    switch (kind) {
    case SlotKind::forward:
        return "forward";
    case SlotKind::backward:
        return "backward";
    case SlotKind::dgrad:
        return "dgrad";
    case SlotKind::wgrad:
        return "wgrad";
    case SlotKind::begin:
        return "begin";
    case SlotKind::finish:
        return "finish";
    }
    return "?";
}

int rank_of_stage(ScheduleKind kind, int pp, int stage) {
    return in_a_v(kind) && stage >= pp ? 2 * pp - 1 - stage : stage % pp;
}

int stage_of(ScheduleKind kind, int pp, int rank, int chunk) {
    return in_a_v(kind) && chunk == 1 ? 2 * pp - 1 - rank : chunk * pp + rank;
}

std::vector<int> in_flight(const std::vector<Turn>& turns, int vpp) {
    std::vector<int> now(static_cast<std::size_t>(vpp), 0);
    std::vector<int> most = now;
    for (const Turn& turn : turns) {
        const auto chunk = static_cast<std::size_t>(turn.chunk);
        now[chunk] += change(turn);
        most[chunk] = std::max(most[chunk], now[chunk]);
    }
    return most;
}

std::vector<Kept> kept_together(const std::vector<Turn>& turns, int vpp) {
    const auto covers = [](const Kept& a, const Kept& b) {
        return a.forward == b.forward && a.backward == b.backward &&
               std::equal(a.micro_batches.begin(), a.micro_batches.end(), b.micro_batches.begin(),
                          [](int x, int y) { return x >= y; });
    };
    std::vector<Kept> states;
    const auto note = [&](const Kept& now) {
        if (std::any_of(states.begin(), states.end(), [&](const Kept& state) { return covers(state, now); })) return;
        std::erase_if(states, [&](const Kept& state) { return covers(now, state); });
        states.push_back(now);
    };
    Kept now{std::vector<int>(static_cast<std::size_t>(vpp), 0), -1, -1};
    const auto apply = [&now](const Turn& turn) {
        now.micro_batches[static_cast<std::size_t>(turn.chunk)] += change(turn);
    };
    for (std::size_t i = 0; i < turns.size(); ++i) {
        const Turn& turn = turns[i];
        now.forward = now.backward = -1;
        if (turn.merged) {
            now.forward = turn.chunk;
            now.backward = turns[i + 1].chunk;
            note(now);
            apply(turns[i]);
            apply(turns[++i]);
            continue;
        }
        if (turn.kind == SlotKind::backward || turn.kind == SlotKind::dgrad) note(now);
        apply(turn);
    }
    return states;
}

} // namespace moe::plan
