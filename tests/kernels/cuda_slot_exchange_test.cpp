// The exchange of slots through windows against copies on the host: several ranks on one device, each on a stream of
// its own, and one per device where there are several. Windows are plain memory here, without NCCL.
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

using namespace moe;

namespace {

using Bytes = std::vector<unsigned char>;
constexpr unsigned char untouched = 0xff;

struct Rank {
    int device = 0;
    cudaStream_t stream = nullptr;
    unsigned char *x = nullptr, *y = nullptr;
    std::int32_t* counts = nullptr;
    char* window = nullptr;
    char** reached = nullptr;
    SlotGroup group;
};

int devices() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Ranks whose slots hold random bytes; rank r on device r modulo `on`.
class SlotRanks {
public:
    SlotRanks(int count, const ChunkShape& shape, int on, int blocks, double patience = 10.0)
        : shape_(shape), ranks_(static_cast<std::size_t>(count)), bytes_(count * shape.slot_bytes()) {
        CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&trouble_), sizeof(int)));
        *trouble_ = 0;
        const std::int64_t window = cuda_exchange_kernels().window_bytes(count, bytes_, false);
        std::mt19937 draw(17);
        for (int r = 0; r < count; ++r) {
            Rank& rank = ranks_[static_cast<std::size_t>(r)];
            rank.device = r % on;
            CUDA_CHECK(cudaSetDevice(rank.device));
            for (int other = 0; other < on; ++other)
                if (other != rank.device && cudaDeviceEnablePeerAccess(other, 0) != cudaSuccess) cudaGetLastError();
            CUDA_CHECK(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
            take(rank.x, bytes_);
            take(rank.y, bytes_);
            take(rank.counts, 4 * count * count);
            take(rank.window, window);
            take(rank.reached, 8 * count);
            CUDA_CHECK(cudaMemset(rank.window, 0, static_cast<std::size_t>(window)));
            Bytes x(static_cast<std::size_t>(bytes_));
            for (unsigned char& byte : x) byte = static_cast<unsigned char>(draw() % untouched);
            CUDA_CHECK(cudaMemcpy(rank.x, x.data(), x.size(), cudaMemcpyHostToDevice));
            x_.push_back(std::move(x));
            rank.group = {count, r, 0, blocks, window, rank.window, rank.reached, nullptr, patience, trouble_};
        }
        std::vector<char*> windows;
        for (const Rank& rank : ranks_) windows.push_back(rank.window);
        for (const Rank& rank : ranks_)
            CUDA_CHECK(cudaMemcpy(rank.reached, windows.data(), windows.size() * sizeof(char*), cudaMemcpyDefault));
    }
    ~SlotRanks() {
        for (void* memory : memory_) cudaFree(memory);
        for (const Rank& rank : ranks_) cudaStreamDestroy(rank.stream);
        cudaFreeHost(trouble_);
    }
    SlotRanks(const SlotRanks&) = delete;
    SlotRanks& operator=(const SlotRanks&) = delete;

    int count() const { return static_cast<int>(ranks_.size()); }
    const Rank& operator[](int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

    // What the members have for each other from now on; y is as nobody has written it.
    void set(const std::vector<std::int32_t>& counts) {
        counts_ = counts;
        for (const Rank& rank : ranks_) {
            CUDA_CHECK(cudaMemcpy(rank.counts, counts.data(), 4 * counts.size(), cudaMemcpyDefault));
            CUDA_CHECK(cudaMemset(rank.y, untouched, static_cast<std::size_t>(bytes_)));
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    void exchange(int rank) const {
        const Rank& r = (*this)[rank];
        CUDA_CHECK(cudaSetDevice(r.device));
        cuda_exchange_kernels().exchange(r.group, shape_, r.x, r.counts, r.y, r.stream);
    }
    int wait() const {
        for (const Rank& rank : ranks_) {
            CUDA_CHECK(cudaSetDevice(rank.device));
            CUDA_CHECK(cudaStreamSynchronize(rank.stream));
        }
        return *trouble_;
    }
    // Bytes of all results that differ from the chunks that should have come, or that should not have been written.
    std::int64_t wrong() const {
        std::int64_t wrong = 0;
        const std::int64_t slot = shape_.slot_bytes();
        for (int to = 0; to < count(); ++to) {
            Bytes y(static_cast<std::size_t>(bytes_));
            CUDA_CHECK(cudaMemcpy(y.data(), (*this)[to].y, y.size(), cudaMemcpyDeviceToHost));
            for (int from = 0; from < count(); ++from) {
                const int at = shape_.back ? to * count() + from : from * count() + to;
                const std::int64_t moved = shape_.moved_bytes(counts_[static_cast<std::size_t>(at)]);
                const unsigned char* got = y.data() + from * slot;
                const unsigned char* sent = x_[static_cast<std::size_t>(from)].data() + to * slot;
                for (std::int64_t i = 0; i < slot; ++i) wrong += got[i] != (i < moved ? sent[i] : untouched);
            }
        }
        return wrong;
    }

private:
    template <class T>
    void take(T*& at, std::int64_t bytes) {
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&at), static_cast<std::size_t>(bytes)));
        memory_.push_back(at);
    }

    ChunkShape shape_;
    std::vector<Rank> ranks_;
    std::int64_t bytes_;
    std::vector<Bytes> x_;
    std::vector<std::int32_t> counts_;
    std::vector<void*> memory_;
    int* trouble_ = nullptr;
};

std::vector<std::int32_t> drawn(int ranks, std::int64_t slot_rows, unsigned seed) {
    std::mt19937 draw(seed);
    std::vector<std::int32_t> counts(static_cast<std::size_t>(ranks * ranks));
    for (std::int32_t& rows : counts) {
        const unsigned kind = draw() % 5;
        const auto most = static_cast<unsigned>(slot_rows);
        rows = static_cast<std::int32_t>(kind == 0 ? 0 : kind == 1 ? most : draw() % (most + 1));
    }
    return counts;
}

// Calls one after another with other counts, and a captured one that is played twice.
void check_case(int count, const ChunkShape& shape, int on, int blocks) {
    SlotRanks ranks(count, shape, on, blocks);
    INFO(count, " ranks, ", shape.slot_rows, " rows of ", shape.row_bytes, " bytes, ", blocks, " blocks");
    for (unsigned call = 0; call < 3; ++call) {
        ranks.set(drawn(count, shape.slot_rows, 3 * call + 1));
        for (int r = 0; r < count; ++r) ranks.exchange(r);
        REQUIRE(ranks.wait() == 0);
        CHECK(ranks.wrong() == 0);
    }
    std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(count));
    for (int r = 0; r < count; ++r) {
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaSetDevice(ranks[r].device));
        CUDA_CHECK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
        for (int again = 0; again < 3; ++again) ranks.exchange(r);
        CUDA_CHECK(cudaStreamEndCapture(ranks[r].stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&graphs[static_cast<std::size_t>(r)], graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    for (unsigned play = 0; play < 2; ++play) {
        ranks.set(drawn(count, shape.slot_rows, 50 + play));
        for (int r = 0; r < count; ++r) {
            CUDA_CHECK(cudaSetDevice(ranks[r].device));
            CUDA_CHECK(cudaGraphLaunch(graphs[static_cast<std::size_t>(r)], ranks[r].stream));
        }
        REQUIRE(ranks.wait() == 0);
        CHECK(ranks.wrong() == 0);
    }
    for (cudaGraphExec_t graph : graphs) CUDA_CHECK(cudaGraphExecDestroy(graph));
}

void check_shapes(int on) {
    for (const int ranks : {1, 2, 4, 8}) {
        if (ranks % on != 0) continue;
        for (const bool back : {false, true})
            // Members on one device wait for each other, so all of their blocks must be there at once: 132 at most.
            for (const int blocks : {5, std::min(24, 128 * on / ranks)}) {
                check_case(ranks, {300, 128, 32, back}, on, blocks);  // routing weights: whole packs of 16 bytes
                check_case(ranks, {301, 128, 8, back}, on, blocks);   // choices, two of a token
                check_case(ranks, {77, 128, 6, back}, on, blocks);    // a slot of less than a chunk, odd rows
                check_case(ranks, {150, 64, 4096, back}, on, blocks); // rows of 2,048 columns
            }
    }
}

} // namespace

TEST_CASE("slot exchange: filled chunks arrive and nothing else is written, on one device") { check_shapes(1); }

TEST_CASE("slot exchange: filled chunks arrive and nothing else is written, on two devices") {
    if (devices() < 2) {
        std::printf("skipped: needs 2 GPUs, this machine has %d\n", devices());
        return;
    }
    check_shapes(2);
}

TEST_CASE("slot exchange: a rank that does not come is named") {
    SlotRanks ranks(2, {64, 16, 64, false}, 1, 4, 0.2);
    ranks.set({1, 1, 1, 1});
    ranks.exchange(0);
    CHECK(ranks.wait() == 2);
}

TEST_CASE("slot exchange: calls beyond the window and the kernel's limits are named") {
    SlotGroup group;
    group.members = 2;
    group.window_bytes = cuda_exchange_kernels().window_bytes(2, 8192, false);
    const auto call = [&](const ChunkShape& shape) {
        cuda_exchange_kernels().exchange(group, shape, nullptr, nullptr, nullptr, nullptr);
    };
    CHECK_THROWS_WITH_AS(call({65, 16, 64, false}), doctest::Contains("8320 bytes, rows of 64, in a window for 8192"),
                         std::runtime_error);
    group.blocks = 33;
    CHECK_THROWS_WITH_AS(call({64, 16, 64, false}), doctest::Contains("is 33, at most 32"), std::runtime_error);
}
