// Threads of the ends, and graphs of calls between two stamps.
#include "engine/bench/bench_ends.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <thread>

namespace moe::bench {

void at_every(std::vector<BenchEnd>& ends, const std::function<void(BenchEnd&, int)>& job) {
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

std::vector<BenchEnd> open_ends(const ops::Backend& backend, int ranks, std::int64_t bytes) {
    std::vector<BenchEnd> ends(static_cast<std::size_t>(ranks));
    at_every(ends, [&](BenchEnd& end, int rank) {
        end.device = backend.open(backend.can_replay, rank);
        end.memory = end.device->allocate(static_cast<std::size_t>(bytes));
        if (end.memory == nullptr)
            fail("GPU {}: {} MiB are not free, to measure communication", rank, (bytes >> 20) + 1);
        end.device->fill(end.memory, 0x3c, static_cast<std::size_t>(bytes)); // 0x3c3c is a small number in BF16.
    });
    return ends;
}

void release(std::vector<BenchEnd>& ends) {
    at_every(ends, [](BenchEnd& end, int) { end.device->release(end.memory); });
}

std::unique_ptr<comm::QueuedFabric> join_ends(const ops::Backend& backend, const plan::Mesh& mesh,
                                              const program::Program& program, std::vector<BenchEnd>& ends) {
    const int stages = mesh.group_size({plan::Domain::dense, plan::axis::pipeline});
    const std::vector<const program::Program*> of_stages(static_cast<std::size_t>(stages), &program);
    std::vector<comm::CommGroup> comm_groups = comm::comm_groups_of(of_stages, mesh);
    std::vector<comm::MeetingPoint> points;
    for (std::size_t i = 0; i < comm_groups.size(); ++i) points.push_back(backend.collectives().meeting_point());
    auto fabric = std::make_unique<comm::QueuedFabric>(backend.collectives(), mesh, std::move(comm_groups),
                                                       std::move(points), nullptr);
    at_every(ends, [&](BenchEnd& end, int rank) {
        end.communicator = std::make_unique<comm::QueuedCommunicator>(*fabric, rank, *end.device, *backend.kernels,
                                                                      std::vector<const program::Program*>{&program});
    });
    return fabric;
}

void leave(std::vector<BenchEnd>& ends) {
    at_every(ends, [](BenchEnd& end, int) { end.communicator.reset(); });
}

namespace {
constexpr int rounds = 5; // The first round warms up; others may be disturbed from outside.
}

double seconds_of_call(BenchEnd& end, program::Stream stream, std::size_t calls,
                       const std::function<void(std::size_t)>& call) {
    device::Queue& queue = *end.device->queue();
    const int number = static_cast<int>(stream);
    const auto run = [&] {
        end.communicator->begin_step();
        queue.fork(number);
        end.communicator->use(stream, queue.stream(number));
        for (std::size_t i = 0; i <= calls; ++i) {
            if (i == 1) queue.stamp(0);
            queue.signal(2 * i, 0);
            queue.await(2 * i, number);
            queue.mark(1, number);
            call(i);
            queue.mark(2, number);
            queue.signal(2 * i + 1, number);
            queue.await(2 * i + 1, 0);
        }
        queue.stamp(1);
        queue.join(number);
    };
    queue.reserve(2, 2 * calls + 2);
    queue.prepare(true, run);
    double least = std::numeric_limits<double>::infinity();
    for (int round = 0; round < rounds; ++round) {
        queue.play(true, run);
        queue.wait();
        if (round > 0) least = std::min(least, queue.seconds(1));
    }
    queue.forget();
    return std::max(least / static_cast<double>(calls), 1e-9);
}

} // namespace moe::bench
