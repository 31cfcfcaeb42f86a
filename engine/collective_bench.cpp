// Times communication through the engine's own communicator, on devices that have nothing else to do.
#include "engine/collective_bench.hpp"

#include "engine/comm/queued.hpp"
#include "planner/error.hpp"
#include "planner/measured.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <thread>

namespace moe {

namespace {

constexpr std::int64_t cols = 2048; // of BF16 rows
constexpr std::int64_t row_bytes = 2 * cols;
constexpr Group samples{Domain::dense, axis::data}, experts{Domain::expert, axis::expert},
    expert_tensor{Domain::expert, axis::tensor}, pipeline{Domain::dense, axis::pipeline};

// One op at its largest: it sizes the communicator's buffers, and smaller calls follow its attributes.
struct Kind {
    OpKind kind;
    Stream stream; // collectives of a group on two streams have a communicator each
    Group group;
    Attr attr;
};

// Ranks with one mesh between them.
struct World {
    Plan plan;
    std::vector<Kind> kinds;
};

RowsAttr rows_attr(int ep, int etp, bool combine) {
    RowsAttr attr;
    attr.cols = cols;
    attr.experts = attr.ep = ep;
    attr.etp = etp;
    attr.combine = combine;
    return attr;
}

std::vector<World> worlds(int n) {
    const auto plan = [n](int Plan::*dense, int Plan::*expert) {
        Plan p;
        p.gpus = n;
        p.*dense = p.*expert = n;
        return p;
    };
    AllToAllAttr heads;
    heads.parts = n;
    heads.cols = cols;
    heads.pieces = {cols, 0, 0};
    std::vector<World> all{{plan(&Plan::dp, &Plan::ep),
                            {{OpKind::ring_exchange, Stream::tensor, samples, {}},
                             {OpKind::all_to_all, Stream::tensor, samples, heads},
                             {OpKind::all_to_all_rows, Stream::expert, experts, rows_attr(n, 1, false)},
                             {OpKind::all_gather, Stream::data, samples, {}},
                             {OpKind::reduce_scatter, Stream::data, samples, {}},
                             {OpKind::all_reduce, Stream::data, samples, ReduceAttr{}}}},
                           {plan(&Plan::tp, &Plan::etp),
                            {{OpKind::all_gather_rows, Stream::expert, expert_tensor, rows_attr(1, n, false)},
                             {OpKind::reduce_scatter_rows, Stream::expert, expert_tensor, rows_attr(1, n, true)}}}};
    if (n == 2)
        all.push_back(
            {plan(&Plan::pp, &Plan::pp), {{OpKind::send, Stream::pipeline_out, pipeline, PeerAttr{1, 0, 1}}}});
    return all;
}

// Rows on either side of the op's largest call: x and y.
std::pair<std::int64_t, std::int64_t> largest_rows(OpKind kind, int n, std::int64_t rows) {
    switch (kind) {
    case OpKind::all_gather:
    case OpKind::all_gather_rows:
        return {rows / n, rows};
    case OpKind::reduce_scatter:
    case OpKind::reduce_scatter_rows:
        return {rows, rows / n};
    default:
        return {rows, rows};
    }
}

Program program_of(const World& world, std::int64_t most_rows) {
    Program program;
    program.templates.resize(1);
    for (const Kind& k : world.kinds) {
        const auto [x, y] = largest_rows(k.kind, world.plan.gpus, most_rows);
        Op op;
        op.kind = k.kind;
        op.stream = k.stream;
        op.group = k.group;
        op.attr = k.attr;
        for (const std::int64_t rows : {x, y}) {
            Tensor tensor;
            tensor.dtype = Dtype::bf16;
            tensor.rows = rows;
            tensor.cols = cols;
            (op.in.empty() ? op.in : op.out).push_back(static_cast<TensorId>(program.tensors.size()));
            program.tensors.push_back(tensor);
        }
        program.templates[0].ops.push_back(op);
    }
    program.slots.push_back({});
    return program;
}

struct End {
    std::unique_ptr<Device> device;
    std::unique_ptr<QueuedCommunicator> communicator;
    char *x = nullptr, *y = nullptr;
    std::int32_t* counts = nullptr; // rows for each expert of every source
};

void for_each(std::vector<End>& ends, const std::function<void(End&, int)>& job) {
    std::vector<std::exception_ptr> faults(ends.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ends.size(); ++r)
        threads.emplace_back([&, r] {
            try {
                job(ends[r], static_cast<int>(r));
            } catch (...) {
                faults[r] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& fault : faults)
        if (fault) std::rethrow_exception(fault);
}

// A call that moves `rows` rows on its larger side.
void call(End& end, const Kind& k, std::int64_t rows, int n, int rank) {
    Communicator& c = *end.communicator;
    const std::int64_t bytes = rows * row_bytes;
    switch (k.kind) {
    case OpKind::ring_exchange:
        return c.ring_exchange(k.group, end.x, end.y, bytes);
    case OpKind::all_to_all: {
        AllToAllAttr attr = std::get<AllToAllAttr>(k.attr);
        attr.rows = rows;
        return c.all_to_all(k.group, end.x, end.y, attr, 2);
    }
    case OpKind::all_to_all_rows:
        return c.all_to_all_rows(k.group, end.x, end.counts, end.y, std::get<RowsAttr>(k.attr), Dtype::bf16, rows,
                                 rows);
    case OpKind::all_gather_rows:
        return c.all_gather_rows(k.group, end.x, end.counts, end.y, std::get<RowsAttr>(k.attr), Dtype::bf16, rows / n,
                                 rows);
    case OpKind::reduce_scatter_rows:
        return c.reduce_scatter_rows(k.group, end.x, end.counts, end.y, std::get<RowsAttr>(k.attr), Dtype::bf16, rows,
                                     rows / n);
    case OpKind::all_gather:
        return c.all_gather(k.group, end.x, end.y, bytes / n);
    case OpKind::reduce_scatter:
        return c.reduce_scatter(k.group, end.x, end.y, bytes / 2 / n, Dtype::bf16);
    case OpKind::all_reduce:
        return c.all_reduce(k.group, end.x, end.y, bytes / 2, Dtype::bf16, false);
    case OpKind::send:
        if (rank != 0) return c.recv(PeerAttr{1, 0, 1}, end.y, bytes);
        c.put(PeerAttr{1, 0, 1}, end.x, bytes);
        return c.send(PeerAttr{1, 0, 1}, end.x, bytes);
    default:
        fail("no measurement of {}", to_string(k.kind));
    }
}

// Seconds of one of several calls behind each other, each behind a signal of the stream that computes, marked as the
// executor marks it and waited for: the second run of a graph of them.
double timed(End& end, const Kind& k, std::int64_t rows, int n, int rank) {
    const std::size_t calls = rows * row_bytes > (16 << 20) ? 6 : 20;
    Queue& queue = *end.device->queue();
    const int stream = static_cast<int>(k.stream);
    const auto run = [&] {
        end.communicator->begin_step();
        queue.fork(stream);
        end.communicator->use(k.stream, queue.stream(stream));
        for (std::size_t i = 0; i <= calls; ++i) {
            if (i == 1) queue.stamp(0);
            queue.signal(2 * i, 0);
            queue.await(2 * i, stream);
            queue.mark(1, stream);
            call(end, k, rows, n, rank);
            queue.mark(2, stream);
            queue.signal(2 * i + 1, stream);
            queue.await(2 * i + 1, 0);
        }
        queue.stamp(1);
        queue.join(stream);
    };
    queue.reserve(2, 2 * calls + 2);
    queue.prepare(true, run);
    for (int round = 0; round < 2; ++round) {
        queue.play(true, run);
        queue.wait();
    }
    const double seconds = queue.seconds(1) / static_cast<double>(calls);
    queue.forget();
    return std::max(seconds, 1e-9);
}

// As many rows for each expert; where there is one expert rank, all of a member's.
void write_counts(End& end, const Kind& k, std::int64_t rows, int n) {
    const auto* attr = std::get_if<RowsAttr>(&k.attr);
    if (attr == nullptr) return;
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(n * attr->experts),
                                           static_cast<std::int32_t>(rows / n));
    end.device->write(end.counts, counts.data(), counts.size() * sizeof counts[0]);
    end.device->queue()->wait();
}

void measure(std::vector<End>& ends, const Kind& k, int n, std::int64_t most_rows, CollectiveBench& result) {
    std::vector<MeasuredCall>& calls = result.measured[group_key(to_string(k.kind), n)];
    for (std::int64_t rows = n; rows <= most_rows; rows *= 8) {
        std::vector<double> seconds(ends.size());
        for_each(ends, [&](End& end, int rank) {
            write_counts(end, k, rows, n);
            seconds[static_cast<std::size_t>(rank)] = timed(end, k, rows, n, rank);
        });
        const double bytes = static_cast<double>(rows * row_bytes);
        calls.push_back({bytes, *std::max_element(seconds.begin(), seconds.end()), {}});
        if (k.kind == OpKind::all_to_all_rows) calls.back().sides = {n * bytes};
    }
}

// A first communicator brings the library's kernels along; of those that send to each other besides, the second shows
// what one alone takes.
void note_taken(const QueuedFabric& fabric, const std::map<std::size_t, double>& taken, CommunicatorBytes& bytes) {
    std::vector<double> pairwise;
    for (const auto& [number, each] : taken) {
        const Circle& circle = fabric.circles()[number];
        if (circle.messages())
            bytes.messages = each;
        else if (circle.pairwise)
            pairwise.push_back(each);
        else
            bytes.collective = each;
    }
    if (pairwise.size() < 2) return;
    bytes.pairwise = pairwise[1];
    bytes.first = std::max(0.0, pairwise[0] - pairwise[1]);
}

void run_world(const Backend& backend, const World& world, std::vector<End>& ends, std::int64_t most_rows,
               CollectiveBench& result) {
    const Mesh mesh(world.plan);
    const Program program = program_of(world, most_rows);
    const std::vector<const Program*> of_stages(static_cast<std::size_t>(world.plan.pp), &program);
    std::vector<Circle> circles = circles_of(of_stages, mesh);
    std::vector<MeetingPoint> points;
    for (std::size_t i = 0; i < circles.size(); ++i) points.push_back(backend.collectives().meeting_point());
    QueuedFabric fabric(backend.collectives(), mesh, std::move(circles), std::move(points), nullptr);
    for_each(ends, [&](End& end, int rank) {
        end.communicator = std::make_unique<QueuedCommunicator>(fabric, rank, *end.device, *backend.kernels,
                                                                std::vector<const Program*>{&program});
    });
    if (world.plan.tp == 1) note_taken(fabric, ends.front().communicator->taken(), result.taken);
    for (const Kind& k : world.kinds) measure(ends, k, world.plan.gpus, most_rows, result);
    for_each(ends, [](End& end, int) { end.communicator.reset(); });
}

} // namespace

CollectiveBench run_collective_bench(const Backend& backend, int ranks, std::int64_t most_bytes) {
    if (backend.collectives == nullptr || ranks < 2)
        refuse("communication between {} ranks of the {} back end cannot be measured", ranks, backend.name);
    CollectiveBench result;
    std::vector<End> ends(static_cast<std::size_t>(ranks));
    for_each(ends, [&](End& end, int rank) {
        end.device = backend.open(backend.can_replay, rank);
        const auto take = [&](std::int64_t bytes) {
            char* memory = end.device->allocate(static_cast<std::size_t>(bytes));
            if (memory == nullptr) fail("GPU {}: {} MiB are not free, to measure communication", rank, bytes >> 20);
            return memory;
        };
        end.x = take(most_bytes);
        end.y = take(most_bytes);
        end.counts = reinterpret_cast<std::int32_t*>(take(4 * ranks * ranks));
        end.device->fill(end.x, 0x3c, static_cast<std::size_t>(most_bytes)); // small numbers in BF16
    });
    result.device = fmt::format("{} x {}", ranks, ends.front().device->name());
    for (const World& world : worlds(ranks)) run_world(backend, world, ends, most_bytes / row_bytes, result);
    for_each(ends, [](End& end, int) {
        for (char* memory : {end.x, end.y, reinterpret_cast<char*>(end.counts)}) end.device->release(memory);
    });
    return result;
}

} // namespace moe
