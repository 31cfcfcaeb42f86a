// ZB-H1, ZB-V and DualPipeV: which weight gradients wait, and for what.
#include "planner/plan/split_orders.hpp"

#include <algorithm>
#include <deque>

namespace moe::plan {
namespace {

// Writes turns one by one, each kind of a chunk in the order of its micro-batches, and none that is not there to do.
class Writer {
public:
    explicit Writer(int micro_batches) : micro_batches_(micro_batches) {}

    void forward(int chunk) {
        if (forwards_[chunk] < micro_batches_) turns_.push_back({SlotKind::forward, chunk, forwards_[chunk]++});
    }
    void backward(int chunk) {
        if (backwards_[chunk] < forwards_[chunk]) turns_.push_back({SlotKind::backward, chunk, backwards_[chunk]++});
    }
    void dgrad(int chunk) {
        if (backwards_[chunk] >= forwards_[chunk]) return;
        waiting_.push_back({SlotKind::wgrad, chunk, backwards_[chunk]});
        turns_.push_back({SlotKind::dgrad, chunk, backwards_[chunk]++});
    }
    // The weight gradient that has waited longest.
    void wgrad() {
        if (waiting_.empty()) return;
        turns_.push_back(waiting_.front());
        waiting_.pop_front();
    }
    // Both halves, one behind the other: the neighbour gets its message after the first.
    void dgrad_wgrad(int chunk) {
        dgrad(chunk);
        wgrad();
    }
    int forwards_left(int chunk) const { return micro_batches_ - forwards_[chunk]; }
    std::vector<Turn> finish() {
        while (!waiting_.empty()) wgrad();
        return std::move(turns_);
    }

private:
    int micro_batches_;
    int forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
    std::deque<Turn> waiting_;
    std::vector<Turn> turns_;
};

// 1F1B, but rank r keeps r weight gradients waiting: the last rank's dgrads reach the first sooner, and what waits
// fills the drain. Every rank then keeps at most pp micro-batches, as many as the first does anyway. The first rank has
// nobody to send to and runs its backwards whole.
std::vector<Turn> zb_h1(int pp, int micro_batches, int rank) {
    Writer writer(micro_batches);
    for (int i = 0; i < pp - 1 - rank; ++i) writer.forward(0);
    for (int k = 0; k < micro_batches; ++k) {
        writer.forward(0);
        if (rank == 0) {
            writer.backward(0);
            continue;
        }
        writer.dgrad(0);
        if (k >= rank) writer.wgrad();
    }
    return writer.finish();
}

// The way down fills the pipeline, the way back begins as soon as the V has turned; from then on every rank runs one of
// each kind of slot of both chunks in turn, and 2 * pp chunks are kept at most: a micro-batch's worth of layers each.
std::vector<Turn> zb_v(int pp, int micro_batches, int rank) {
    Writer writer(micro_batches);
    for (int i = 0; i < 2 * (pp - rank) - 1; ++i) writer.forward(0);
    for (int i = 0; i < rank; ++i) {
        writer.forward(1);
        writer.forward(0);
    }
    for (int i = 0; i < pp - rank; ++i) {
        writer.forward(1);
        writer.dgrad_wgrad(1);
    }
    while (writer.forwards_left(1) > 0) {
        writer.forward(0);
        writer.dgrad_wgrad(0);
        writer.forward(1);
        writer.dgrad_wgrad(1);
    }
    for (int i = 0; i < rank; ++i) {
        writer.dgrad(0);
        writer.dgrad(1);
    }
    for (int i = 0; i < pp - rank; ++i) writer.dgrad_wgrad(0);
    return writer.finish();
}

// The phases of DeepSeek's DualPipeV: whole backwards beside forwards of the other chunk in the middle, split ones
// where the pipeline fills and drains.
std::vector<Turn> dualpipe_v(int pp, int micro_batches, int rank) {
    Writer writer(micro_batches);
    const int before = pp - 1 - rank; // ranks that a message passes until the V turns
    for (int i = 0; i < 2 * before; ++i) writer.forward(0);
    for (int i = 0; i <= rank; ++i) {
        writer.forward(0);
        writer.forward(1);
    }
    for (int i = 0; i < before; ++i) {
        writer.dgrad_wgrad(1);
        writer.forward(1);
    }
    while (writer.forwards_left(0) > 0) {
        writer.forward(0);
        writer.backward(1);
        writer.forward(1);
        writer.backward(0);
    }
    for (int i = 0; i < before; ++i) {
        writer.backward(1);
        writer.forward(1);
        writer.backward(0);
    }
    // The later half of the rest is split, so that the first ranks' messages leave sooner and wgrads fill the gaps.
    for (int i = 0; i < 2 * (rank + 1); ++i) i <= rank ? writer.backward(1 - i % 2) : writer.dgrad(1 - i % 2);
    for (int i = 0; i < before; ++i) {
        writer.wgrad();
        writer.dgrad(0);
    }
    return writer.finish();
}

} // namespace

std::vector<Turn> split_order(ScheduleKind kind, int pp, int micro_batches, int rank) {
    switch (kind) {
    case ScheduleKind::zb_v:
        return zb_v(pp, micro_batches, rank);
    case ScheduleKind::dualpipe_v:
        return dualpipe_v(pp, micro_batches, rank);
    default:
        return zb_h1(pp, micro_batches, rank);
    }
}

} // namespace moe::plan
