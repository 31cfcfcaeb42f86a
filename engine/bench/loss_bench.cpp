// Times the four ops of a split loss in BF16 over rows and vocabularies, on one rank's share of two.
#include "engine/bench/loss_bench.hpp"

#include "engine/bench/microbench_grid.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::bench {

namespace {

struct LossSize {
    std::int64_t rows;
    int vocab; // vocabulary of both ranks together
};
constexpr LossSize sizes[] = {{1024, 8192},   {4096, 8192},   {2048, 32768}, {8192, 32768},
                              {2048, 131072}, {6144, 131072}, {12288, 65536}};

// The operands of one rank, zeros: logits, their gradient, and what there is of every row.
struct LossRoom {
    char *logits, *gradient;
    float *max, *stat, *loss;
    std::int32_t* labels;
    std::int64_t bytes;

    LossRoom(char* memory, std::int64_t rows, std::int64_t columns)
        : logits(memory),
          gradient(logits + 2 * rows * columns),
          max(reinterpret_cast<float*>(gradient + 2 * rows * columns)),
          stat(max + rows),
          loss(stat + 2 * rows),
          labels(reinterpret_cast<std::int32_t*>(loss + 64)),
          bytes(reinterpret_cast<char*>(labels + rows) - memory) {}
};

void call(const Kernels& kernels, program::OpKind kind, const LossShape& shape, const LossRoom& room, void* stream) {
    const Src logits{room.logits, Type::bf16};
    switch (kind) {
    case program::OpKind::ce_max:
        return kernels.ce_max(shape, logits, room.max, stream);
    case program::OpKind::ce_sum:
        return kernels.ce_sum(shape, logits, room.max, room.labels, room.stat, stream);
    case program::OpKind::ce_loss:
        return kernels.ce_loss(shape, room.max, room.stat, room.loss, stream);
    default:
        return kernels.ce_grad(shape, logits, room.max, room.stat, room.labels, {room.gradient, Type::bf16}, stream);
    }
}

// Seconds of one of several calls behind each other: the second run of a graph of them.
double timed(device::Queue& queue, const std::function<void()>& call) {
    constexpr std::size_t calls = 10;
    const auto run = [&] {
        call();
        queue.stamp(0);
        for (std::size_t i = 0; i < calls; ++i) call();
        queue.stamp(1);
    };
    queue.reserve(2, 0);
    queue.prepare(true, run);
    for (int round = 0; round < 2; ++round) {
        queue.play(true, run);
        queue.wait();
    }
    const double seconds = queue.seconds(1) / calls;
    queue.forget();
    return std::max(seconds, 1e-9);
}

bool of_the_loss(program::OpKind kind) {
    return kind == program::OpKind::ce_max || kind == program::OpKind::ce_sum || kind == program::OpKind::ce_loss ||
           kind == program::OpKind::ce_grad;
}

} // namespace

void measure_split_loss(const ops::Backend& backend, std::int64_t most_bytes,
                        std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    const std::unique_ptr<device::Device> device = backend.open(backend.can_replay, 0);
    std::map<std::string, std::vector<machine::MeasuredCall>> found;
    for (const LossSize& size : sizes) {
        if (size.rows * size.vocab > most_bytes) continue; // Two ranks hold two bytes per logit each.
        Point point{"mixtral", 256, 4, 4, 64, 256, 8, 2, 0, size.vocab, size.rows, 1};
        point.sharing = {.ranks = 2, .tp = 2, .ep = 2};
        const program::Program head = lower::lower_segment(plan_of(point, backend), lower::SegmentKind::head);
        for (const program::Template& ops : head.templates)
            for (const program::Op& op : ops.ops) {
                if (!of_the_loss(op.kind)) continue;
                const program::LossAttr& attr = std::get<program::LossAttr>(op.attr);
                const std::int64_t bytes = LossRoom(nullptr, attr.rows, attr.vocab_local).bytes;
                char* memory = device->allocate(static_cast<std::size_t>(bytes));
                if (memory == nullptr) fail("{} MiB are not free, to measure the loss", bytes >> 20);
                device->fill(memory, 0, static_cast<std::size_t>(bytes));
                const LossRoom room(memory, attr.rows, attr.vocab_local);
                const LossShape shape{attr.rows, attr.vocab_local, attr.vocab, 0, attr.scale};
                const double seconds = timed(
                    *device->queue(), [&] { call(*backend.kernels, op.kind, shape, room, device->queue()->stream()); });
                device->release(memory);
                const program::CostPoint at = program::cost_point(op, head);
                found[at.key].push_back({at.work, seconds, at.sides});
            }
    }
    for (auto& [key, calls] : found) {
        std::stable_sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
        measured[key] = std::move(calls);
    }
}

} // namespace moe::bench
