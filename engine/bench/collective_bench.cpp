// Times communication through the engine's own communicator, on devices that have nothing else to do.
#include "engine/bench/collective_bench.hpp"

#include "engine/bench/bench_ends.hpp"
#include "engine/bench/loss_bench.hpp"
#include "engine/bench/token_bench.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::bench {

namespace {

constexpr std::int64_t cols = 2048; // columns of the BF16 rows
constexpr std::int64_t row_bytes = 2 * cols;
constexpr plan::Group samples{plan::Domain::dense, plan::axis::data}, experts{plan::Domain::expert, plan::axis::expert},
    expert_tensor{plan::Domain::expert, plan::axis::tensor}, pipeline{plan::Domain::dense, plan::axis::pipeline};

// One op at its largest: it sizes the communicator's buffers, and smaller calls follow its attributes.
struct Kind {
    program::OpKind kind;
    program::Stream stream; // Collectives of a group on two streams have a communicator each.
    plan::Group group;
    program::Attr attr;
};

// Ranks with one mesh between them.
struct World {
    plan::Plan plan;
    std::vector<Kind> kinds;
};

program::RowsAttr rows_attr(int ep, int etp, bool combine) {
    program::RowsAttr attr;
    attr.cols = cols;
    attr.experts = attr.ep = ep;
    attr.etp = etp;
    attr.combine = combine;
    return attr;
}

std::vector<World> worlds(int n) {
    const auto plan = [n](int plan::Plan::*dense, int plan::Plan::*expert) {
        plan::Plan p;
        p.gpus = n;
        p.*dense = p.*expert = n;
        return p;
    };
    program::AllToAllAttr heads;
    heads.parts = n;
    heads.cols = cols;
    heads.pieces = {cols, 0, 0};
    std::vector<World> all{
        {plan(&plan::Plan::tp, &plan::Plan::etp),
         {{program::OpKind::all_gather_rows, program::Stream::expert, expert_tensor, rows_attr(1, n, false)},
          {program::OpKind::reduce_scatter_rows, program::Stream::expert, expert_tensor, rows_attr(1, n, true)}}},
        {plan(&plan::Plan::dp, &plan::Plan::ep),
         {{program::OpKind::ring_exchange, program::Stream::tensor, samples, {}},
          {program::OpKind::all_to_all, program::Stream::tensor, samples, heads},
          {program::OpKind::all_to_all_rows, program::Stream::expert, experts, rows_attr(n, 1, false)},
          {program::OpKind::all_gather, program::Stream::data, samples, {}},
          {program::OpKind::reduce_scatter, program::Stream::data, samples, {}},
          {program::OpKind::all_reduce, program::Stream::data, samples, program::ReduceAttr{}}}}};
    if (n == 2)
        all.push_back({plan(&plan::Plan::pp, &plan::Plan::pp),
                       {{program::OpKind::send, program::Stream::pipeline_out, pipeline, program::PeerAttr{1, 0, 1}}}});
    return all;
}

// Rows on either side of the op's largest call: x and y.
std::pair<std::int64_t, std::int64_t> largest_rows(program::OpKind kind, int n, std::int64_t rows) {
    switch (kind) {
    case program::OpKind::all_gather:
    case program::OpKind::all_gather_rows:
        return {rows / n, rows};
    case program::OpKind::reduce_scatter:
    case program::OpKind::reduce_scatter_rows:
        return {rows, rows / n};
    default:
        return {rows, rows};
    }
}

program::Program program_of(const World& world, std::int64_t most_rows) {
    program::Program program;
    program.templates.resize(1);
    for (const Kind& k : world.kinds) {
        const auto [x, y] = largest_rows(k.kind, world.plan.gpus, most_rows);
        program::Op op;
        op.kind = k.kind;
        op.stream = k.stream;
        op.group = k.group;
        op.attr = k.attr;
        for (const std::int64_t rows : {x, y}) {
            program::Tensor tensor;
            tensor.dtype = program::Dtype::bf16;
            tensor.rows = rows;
            tensor.cols = cols;
            (op.in.empty() ? op.in : op.out).push_back(static_cast<program::TensorId>(program.tensors.size()));
            program.tensors.push_back(tensor);
        }
        program.templates[0].ops.push_back(op);
    }
    program.slots.push_back({});
    return program;
}

// Operands of an end: both sides at their largest, and rows for each expert of every source. Smaller calls have their
// sides at several places.
struct CollectiveRoom {
    char *x, *y;
    std::int32_t* counts;
    static std::int64_t bytes(std::int64_t most_rows, int n) { return 2 * most_rows * row_bytes + 4 * n * n; }
    CollectiveRoom(const BenchEnd& end, std::int64_t most_rows, std::int64_t rows, std::size_t call)
        : x(end.memory),
          y(x + most_rows * row_bytes),
          counts(reinterpret_cast<std::int32_t*>(y + most_rows * row_bytes)) {
        const std::int64_t place = static_cast<std::int64_t>(call) % (most_rows / rows) * rows * row_bytes;
        x += place;
        y += place;
    }
};

// A call that moves `rows` rows on its larger side.
void call(comm::Communicator& c, const CollectiveRoom& room, const Kind& k, std::int64_t rows, int n, int rank) {
    const std::int64_t bytes = rows * row_bytes;
    switch (k.kind) {
    case program::OpKind::ring_exchange:
        return c.ring_exchange(k.group, room.x, room.y, bytes);
    case program::OpKind::all_to_all: {
        program::AllToAllAttr attr = std::get<program::AllToAllAttr>(k.attr);
        attr.rows = rows;
        return c.all_to_all(k.group, room.x, room.y, attr, 2);
    }
    case program::OpKind::all_to_all_rows:
        return c.all_to_all_rows(k.group, room.x, room.counts, room.y, std::get<program::RowsAttr>(k.attr),
                                 program::Dtype::bf16, rows, rows);
    case program::OpKind::all_gather_rows:
        return c.all_gather_rows(k.group, room.x, room.counts, room.y, std::get<program::RowsAttr>(k.attr),
                                 program::Dtype::bf16, rows / n, rows);
    case program::OpKind::reduce_scatter_rows:
        return c.reduce_scatter_rows(k.group, room.x, room.counts, room.y, std::get<program::RowsAttr>(k.attr),
                                     program::Dtype::bf16, rows, rows / n);
    case program::OpKind::all_gather:
        return c.all_gather(k.group, room.x, room.y, bytes / n);
    case program::OpKind::reduce_scatter:
        return c.reduce_scatter(k.group, room.x, room.y, bytes / 2 / n, program::Dtype::bf16);
    case program::OpKind::all_reduce:
        return c.all_reduce(k.group, room.x, room.y, bytes / 2, program::Dtype::bf16, false);
    case program::OpKind::send:
        if (rank != 0) return c.recv(program::PeerAttr{1, 0, 1}, room.y, bytes);
        c.put(program::PeerAttr{1, 0, 1}, room.x, bytes);
        return c.send(program::PeerAttr{1, 0, 1}, room.x, bytes);
    default:
        fail("no measurement of {}", program::to_string(k.kind));
    }
}

// Writes as many rows for each expert; where there is one expert rank, all of a member's.
void write_counts(BenchEnd& end, std::int32_t* at, const Kind& k, std::int64_t rows, int n) {
    const auto* attr = std::get_if<program::RowsAttr>(&k.attr);
    if (attr == nullptr) return;
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(n * attr->experts),
                                           static_cast<std::int32_t>(rows / n));
    end.device->write(at, counts.data(), counts.size() * sizeof counts[0]);
    end.device->queue()->wait();
}

void measure(std::vector<BenchEnd>& ends, const Kind& k, int n, std::int64_t most_rows, CollectiveBench& result) {
    std::vector<machine::MeasuredCall>& calls = result.measured[program::group_key(program::to_string(k.kind), n)];
    for (std::int64_t rows = n; rows <= most_rows; rows *= 4) {
        std::vector<double> seconds(ends.size());
        at_every(ends, [&](BenchEnd& end, int rank) {
            write_counts(end, CollectiveRoom(end, most_rows, rows, 0).counts, k, rows, n);
            seconds[static_cast<std::size_t>(rank)] =
                seconds_of_call(end, k.stream, rows * row_bytes > (16 << 20) ? 6 : 20, [&](std::size_t number) {
                    call(*end.communicator, CollectiveRoom(end, most_rows, rows, number), k, rows, n, rank);
                });
        });
        const double bytes = static_cast<double>(rows * row_bytes);
        calls.push_back({bytes, *std::max_element(seconds.begin(), seconds.end()), {}});
        if (k.kind == program::OpKind::all_to_all_rows) calls.back().sides = {n * bytes};
    }
}

// The bytes that communicators took, one after another, of the member that they took most of.
struct Taken {
    std::vector<double> collective, pairwise, messages;

    void note(const comm::QueuedFabric& fabric, const std::vector<BenchEnd>& ends) {
        std::map<std::size_t, double> most;
        for (const BenchEnd& end : ends)
            for (const auto& [number, bytes] : end.communicator->taken()) most[number] = std::max(most[number], bytes);
        for (const auto& [number, bytes] : most) {
            const comm::CommGroup& group = fabric.comm_groups()[number];
            (group.messages() ? messages : group.pairwise ? pairwise : collective).push_back(bytes);
        }
    }
    // A first one brings the library's kernels along; the last shows what one alone takes.
    machine::CommunicatorBytes bytes(int n) const {
        const auto longer = [](const std::vector<double>& all) { return std::max(0.0, all.front() - all.back()); };
        return {longer(collective),
                longer(pairwise),
                messages.empty() ? 0.0 : messages.back(),
                {{n, collective.back()}},
                {{n, pairwise.back()}}};
    }
};

void run_world(const ops::Backend& backend, const World& world, std::vector<BenchEnd>& ends, std::int64_t most_rows,
               CollectiveBench& result, Taken& taken) {
    const plan::Mesh mesh(world.plan);
    const program::Program program = program_of(world, most_rows);
    const std::unique_ptr<comm::QueuedFabric> fabric = join_ends(backend, mesh, program, ends);
    taken.note(*fabric, ends);
    for (const Kind& k : world.kinds) measure(ends, k, world.plan.gpus, most_rows, result);
    leave(ends);
}

} // namespace

CollectiveBench run_collective_bench(const ops::Backend& backend, int ranks, std::int64_t most_bytes) {
    if (backend.collectives == nullptr || ranks < 2)
        refuse("communication between {} ranks of the {} back end cannot be measured", ranks, backend.name);
    CollectiveBench result;
    const std::int64_t most_rows = most_bytes / row_bytes;
    std::vector<BenchEnd> ends = open_ends(backend, ranks, CollectiveRoom::bytes(most_rows, ranks));
    result.device = fmt::format("{} x {}", ranks, ends.front().device->name());
    Taken taken;
    for (const World& world : worlds(ranks)) run_world(backend, world, ends, most_rows, result, taken);
    result.taken = taken.bytes(ranks);
    release(ends);
    if (backend.peers != nullptr) measure_tokens(backend, ranks, most_bytes, result.measured);
    measure_split_loss(backend, most_bytes, result.measured);
    return result;
}

} // namespace moe::bench
