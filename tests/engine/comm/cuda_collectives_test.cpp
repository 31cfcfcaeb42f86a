// Collectives as the engine queues them, beside a bare loop over NCCL in the same process: times by size, as a graph.
#include "engine/backends/backends.hpp"
#include "engine/comm/queued.hpp"
#include "engine/ops/backend.hpp"
#include "planner/lower/lower.hpp"
#include "tests/engine/train/cuda_parity.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

using namespace moe;

namespace {

constexpr plan::Group everyone{plan::Domain::dense, plan::axis::data};
constexpr std::size_t repeats = 20;

enum class Kind { all_gather, reduce_scatter, all_reduce, ring };
constexpr std::array names{"all_gather", "reduce_scatter", "all_reduce", "ring exchange"};

// Bytes of the larger side, as Op::bytes counts them, to bytes that cross a rank's links one way: bus bandwidth.
double on_the_bus(Kind kind, double bytes, int members) {
    const double share = static_cast<double>(members - 1) / members;
    return kind == Kind::ring ? bytes : kind == Kind::all_reduce ? 2.0 * share * bytes : share * bytes;
}

// One rank's end: the engine's communicator and a bare one, the same memory for both.
struct End {
    std::unique_ptr<device::Device> device;
    std::unique_ptr<comm::QueuedCommunicator> ours;
    comm::CollectiveLibrary::Member bare = nullptr;
    char *x = nullptr, *y = nullptr;
};

void ours(End& end, Kind kind, std::int64_t bytes, int members) {
    end.ours->use(program::Stream::data, end.device->queue()->stream());
    switch (kind) {
    case Kind::all_gather:
        return end.ours->all_gather(everyone, end.x, end.y, bytes / members);
    case Kind::reduce_scatter:
        return end.ours->reduce_scatter(everyone, end.x, end.y, bytes / members / 2, program::Dtype::bf16);
    case Kind::all_reduce:
        return end.ours->all_reduce(everyone, end.x, end.y, bytes / 2, program::Dtype::bf16, false);
    case Kind::ring:
        return end.ours->ring_exchange(everyone, end.x, end.y, bytes);
    }
}

void bare(const comm::CollectiveLibrary& library, End& end, Kind kind, std::int64_t bytes, int members, int rank) {
    void* stream = end.device->queue()->stream();
    switch (kind) {
    case Kind::all_gather:
        return library.all_gather(end.bare, end.x, end.y, bytes / members, stream);
    case Kind::reduce_scatter:
        return library.reduce_scatter(end.bare, end.x, end.y, bytes / members / 2, program::Dtype::bf16, stream);
    case Kind::all_reduce:
        return library.all_reduce(end.bare, end.x, end.y, bytes / 2, program::Dtype::bf16, false, stream);
    case Kind::ring:
        library.begin_group();
        library.send(end.bare, end.x, bytes, (rank + 1) % members, stream);
        library.recv(end.bare, end.y, bytes, (rank + members - 1) % members, stream);
        return library.end_group();
    }
}

// Seconds of one of `repeats` calls in a graph, the second time that it runs.
double timed(device::Device& device, const std::function<void()>& call) {
    device::Queue& queue = *device.queue();
    const auto run = [&] {
        call();
        queue.stamp(0);
        for (std::size_t i = 0; i < repeats; ++i) call();
        queue.stamp(1);
    };
    queue.reserve(2, 0);
    queue.prepare(true, run);
    for (int round = 0; round < 2; ++round) {
        queue.play(true, run);
        queue.wait();
    }
    const double seconds = queue.seconds(1) / static_cast<double>(repeats);
    queue.forget();
    return seconds;
}

void among(std::vector<End>& ends, const std::function<void(End&, int)>& job) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ends.size(); ++r) threads.emplace_back([&, r] { job(ends[r], static_cast<int>(r)); });
    for (std::thread& thread : threads) thread.join();
}

} // namespace

TEST_CASE("cuda ranks: collectives beside bare NCCL") {
    int members = 1;
    while (2 * members <= gpus_here()) members *= 2;
    if (members < 2 || !has_gpus(members)) return;
    const std::string name = "cuda";
    const ops::Backend& backend = backends::backend_named(name);
    const comm::CollectiveLibrary& library = backend.collectives();
    const plan::Plan plan = small_plan("qwen3", members, {{"cp", "1"}});
    const plan::Mesh mesh(plan);
    program::Program program; // ops that say which communicators there must be
    program.templates.resize(1);
    for (const program::OpKind kind : {program::OpKind::all_reduce, program::OpKind::ring_exchange}) {
        program::Op op;
        op.kind = kind;
        op.stream = program::Stream::data;
        op.group = everyone;
        program.templates[0].ops.push_back(op);
    }
    std::vector<comm::CommGroup> comm_groups = comm::comm_groups_of({&program}, mesh);
    REQUIRE(comm_groups.size() == 1);
    comm::QueuedFabric fabric(library, mesh, std::move(comm_groups), {library.meeting_point()}, nullptr);
    const comm::MeetingPoint point = library.meeting_point();
    constexpr std::int64_t most = std::int64_t{1} << 30;

    std::vector<End> ends(static_cast<std::size_t>(members));
    among(ends, [&](End& end, int rank) {
        end.device = backend.open(true, rank);
        end.x = end.device->allocate(most);
        end.y = end.device->allocate(most);
        end.device->fill(end.x, 0x3c, most); // small numbers in BF16
        end.ours = std::make_unique<comm::QueuedCommunicator>(fabric, rank, *end.device, *backend.kernels,
                                                              std::vector<const program::Program*>{&program});
        end.bare = library.join(point, members, rank, 0);
        bare(library, end, Kind::all_reduce, 8, members, rank);
        bare(library, end, Kind::ring, 8, members, rank);
        end.device->queue()->wait();
    });

    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce, Kind::ring})
        for (const std::int64_t bytes : {std::int64_t{4096}, std::int64_t{1} << 20, std::int64_t{64} << 20, most}) {
            std::array<double, 2> seconds{};
            among(ends, [&](End& end, int rank) {
                const double a = timed(*end.device, [&] { ours(end, kind, bytes, members); });
                const double b = timed(*end.device, [&] { bare(library, end, kind, bytes, members, rank); });
                if (rank == 0) seconds = {a, b};
            });
            const double wire = on_the_bus(kind, static_cast<double>(bytes), members);
            const bool small = bytes < (1 << 20);
            const double mine = small ? 1e6 * seconds[0] : wire / seconds[0] / 1e9,
                         other = small ? 1e6 * seconds[1] : wire / seconds[1] / 1e9;
            const double ratio = mine / other;
            const std::string name = fmt::format("{} of {} KiB over {} GPUs beside bare NCCL",
                                                 names[static_cast<std::size_t>(kind)], bytes / 1024, members);
            std::printf("%-64s %8.1f %8.1f %s\n", name.c_str(), mine, other, small ? "us" : "GB/s");
            rows.push_back({{"name", name},
                            {"unit", small ? "us" : "GB/s"},
                            {"ours", mine},
                            {"reference", other},
                            {"ratio", ratio},
                            {"bar", small ? 1.05 : 0.95},
                            {"ok", small ? ratio <= 1.05 : ratio >= 0.95}});
            CHECK(seconds[0] < 1.2 * seconds[1]);
        }
    if (const char* out = std::getenv("MOE_PLAN_OUT")) std::ofstream(out) << rows.dump(1) << "\n";
    among(ends, [&](End& end, int) {
        end.device->queue()->wait();
        library.leave(end.bare);
        end.ours.reset();
        end.device->release(end.x);
        end.device->release(end.y);
    });
}
