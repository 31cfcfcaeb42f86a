// Slots between two GPUs by kernels through NCCL's windows, and by its messages: the same bytes, and the times of both.
#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "kernels/cuda/check.hpp"
#include "tests/engine/train/cuda_parity.hpp"

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

using namespace moe;

namespace {

constexpr int ranks = 2, repeats = 10, plays = 5;

struct End {
    cudaStream_t stream = nullptr;
    comm::CollectiveLibrary::Member member = nullptr;
    std::unique_ptr<comm::SlotWindow> window;
    std::string why;
    char *x = nullptr, *chunks = nullptr, *slots = nullptr; // slots of each rank; what came by kernels and by messages
    std::int32_t* counts = nullptr;
};
using Ends = std::vector<End>;

// Ranks that wait for each other in what they call.
void at_both(Ends& ends, const std::function<void(End&, int)>& job) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            CUDA_CHECK(cudaSetDevice(r));
            job(ends[static_cast<std::size_t>(r)], r);
        });
    for (std::thread& thread : threads) thread.join();
}

void by_messages(const comm::CollectiveLibrary& library, const End& end, std::int64_t slot) {
    library.begin_group();
    for (int m = 0; m < ranks; ++m) {
        library.send(end.member, end.x + m * slot, slot, m, end.stream);
        library.recv(end.member, end.slots + m * slot, slot, m, end.stream);
    }
    library.end_group();
}
void by_kernels(const End& end, const ChunkShape& shape) {
    end.window->kernels().exchange(end.window->group(), shape, end.x, end.counts, end.chunks, end.stream);
}

// Microseconds of one of `repeats` calls in a graph, of the slower rank: the median of the plays behind a first one.
double microseconds(Ends& ends, const std::function<void(const End&)>& call) {
    std::vector<cudaGraphExec_t> graphs(ranks);
    std::vector<cudaEvent_t> begin(ranks), end(ranks);
    at_both(ends, [&](End& e, int r) {
        const auto at = static_cast<std::size_t>(r);
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(e.stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < repeats; ++i) call(e);
        CUDA_CHECK(cudaStreamEndCapture(e.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&graphs[at], graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
        CUDA_CHECK(cudaEventCreate(&begin[at]));
        CUDA_CHECK(cudaEventCreate(&end[at]));
    });
    std::vector<double> times;
    for (int play = 0; play <= plays; ++play) {
        std::vector<double> of(ranks);
        at_both(ends, [&](End& e, int r) {
            const auto at = static_cast<std::size_t>(r);
            float milliseconds = 0.0f;
            CUDA_CHECK(cudaEventRecord(begin[at], e.stream));
            CUDA_CHECK(cudaGraphLaunch(graphs[at], e.stream));
            CUDA_CHECK(cudaEventRecord(end[at], e.stream));
            CUDA_CHECK(cudaStreamSynchronize(e.stream));
            CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin[at], end[at]));
            of[at] = 1e3 * static_cast<double>(milliseconds) / repeats;
        });
        if (play > 0) times.push_back(*std::max_element(of.begin(), of.end()));
    }
    for (std::size_t r = 0; r < ranks; ++r) {
        CUDA_CHECK(cudaGraphExecDestroy(graphs[r]));
        CUDA_CHECK(cudaEventDestroy(begin[r]));
        CUDA_CHECK(cudaEventDestroy(end[r]));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// Slots whose filled chunks differ between both ways, or that are written beyond them.
int wrong(const Ends& ends, const ChunkShape& shape, const std::vector<std::int32_t>& counts) {
    int wrong = 0;
    const auto slot = static_cast<std::size_t>(shape.slot_bytes());
    std::vector<char> chunks(ranks * slot), slots(chunks.size());
    const std::vector<char> untouched(slot, '\xff');
    for (std::size_t r = 0; r < ranks; ++r) {
        CUDA_CHECK(cudaMemcpy(chunks.data(), ends[r].chunks, chunks.size(), cudaMemcpyDefault));
        CUDA_CHECK(cudaMemcpy(slots.data(), ends[r].slots, slots.size(), cudaMemcpyDefault));
        for (std::size_t m = 0; m < ranks; ++m) {
            const std::int32_t rows = counts[shape.back ? r * ranks + m : m * ranks + r];
            const auto moved = static_cast<std::size_t>(shape.moved_bytes(rows));
            const char *got = chunks.data() + m * slot, *want = slots.data() + m * slot;
            if (std::memcmp(got, want, moved) != 0 || std::memcmp(got + moved, untouched.data(), slot - moved) != 0)
                ++wrong;
        }
    }
    return wrong;
}

} // namespace

TEST_CASE("cuda ranks 2: NCCL's windows carry the filled chunks of slots, as its messages do") {
    if (!has_gpus(ranks)) return;
    const comm::CollectiveLibrary& library = backends::backend_named("cuda").collectives();
    constexpr std::int64_t most_bytes = ranks * std::int64_t{16384} * 4096;
    const comm::MeetingPoint point = library.meeting_point();
    Ends ends(ranks);
    at_both(ends, [&](End& end, int r) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&end.stream, cudaStreamNonBlocking));
        for (char** memory : {&end.x, &end.chunks, &end.slots})
            CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(memory), static_cast<std::size_t>(most_bytes)));
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&end.counts), sizeof(std::int32_t) * ranks * ranks));
        std::vector<std::uint64_t> x(static_cast<std::size_t>(most_bytes) / sizeof(std::uint64_t));
        std::mt19937_64 draw(static_cast<std::uint64_t>(r + 1));
        for (std::uint64_t& word : x) word = draw() & 0x7f7f7f7f7f7f7f7f;
        CUDA_CHECK(cudaMemcpy(end.x, x.data(), x.size() * sizeof(std::uint64_t), cudaMemcpyDefault));
        end.member = library.join(point, ranks, r, 32);
        end.window = library.slot_window(end.member, most_bytes, 24, end.why);
    });
    for (const End& end : ends)
        if (!end.window) {
            std::printf("skipped: %s\n", end.why.c_str());
            return;
        }
    at_both(ends, [](End& end, int) { end.why = end.window->open(); });
    for (const End& end : ends) REQUIRE(end.why == "");
    std::printf("    %s; us of an exchange\n     rows bytes filled   chunks    slots\n",
                ends[0].window->name().c_str());
    struct Case {
        std::int64_t rows, row_bytes;
        double filled;
    };
    for (const Case c : {Case{1024, 4096, 0.996}, Case{4096, 4096, 0.996}, Case{16384, 4096, 0.996},
                         Case{16384, 4096, 0.5}, Case{16384, 4096, 0.05}, Case{4096, 32, 0.996}, Case{77, 8, 0.5}})
        for (const bool back : {false, true}) {
            const ChunkShape shape{c.rows, 128, c.row_bytes, back};
            const auto filled = static_cast<std::int32_t>(c.filled * static_cast<double>(c.rows));
            const std::vector<std::int32_t> counts{filled, filled - 1, filled / 2, 0};
            at_both(ends, [&](End& end, int) {
                CUDA_CHECK(cudaMemcpy(end.counts, counts.data(), 4 * counts.size(), cudaMemcpyDefault));
                CUDA_CHECK(cudaMemset(end.chunks, 0xff, static_cast<std::size_t>(most_bytes)));
                CUDA_CHECK(cudaDeviceSynchronize());
                by_messages(library, end, shape.slot_bytes());
                by_kernels(end, shape);
                CUDA_CHECK(cudaStreamSynchronize(end.stream));
            });
            INFO(c.rows, " rows of ", c.row_bytes, " bytes, ", filled, " of them filled, back ", back);
            CHECK(wrong(ends, shape, counts) == 0);
            if (back) continue;
            const std::vector<std::int32_t> even(ranks * ranks, filled);
            at_both(ends, [&](End& end, int) {
                CUDA_CHECK(cudaMemcpy(end.counts, even.data(), 4 * even.size(), cudaMemcpyDefault));
            });
            const double chunks = microseconds(ends, [&](const End&end) { by_kernels(end, shape); }),
                         slots =
                             microseconds(ends, [&](const End&end) { by_messages(library, end, shape.slot_bytes()); });
            CHECK(wrong(ends, shape, even) == 0);
            std::printf("    %5lld %5lld  %.3f %8.1f %8.1f\n", static_cast<long long>(c.rows),
                        static_cast<long long>(c.row_bytes), c.filled, chunks, slots);
        }
    at_both(ends, [&](End& end, int) {
        end.window.reset();
        library.leave(end.member);
        for (char* memory : {end.x, end.chunks, end.slots}) CUDA_CHECK(cudaFree(memory));
        CUDA_CHECK(cudaFree(end.counts));
        CUDA_CHECK(cudaStreamDestroy(end.stream));
    });
}
