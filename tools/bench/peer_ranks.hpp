// Ranks that exchange routed tokens over peer memory outside of any Program, on one device or several: for the op tests
// and the benchmark.
#pragma once

#include "kernels/cuda/cuda_kernels.hpp"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace moe::bench {

struct PeerCase {
    int ranks = 2;
    TokenShape shape; // shape of the calls; capacity 0 = as large as the routing needs
    Type type = Type::bf16;
    int blocks = 24;
    double patience = 10.0;
    bool quantized = false; // whether dispatch takes rows in E4M3 with their scales; combine is as without

    std::int64_t row_bytes() const {
        return quantized ? shape.cols : shape.cols * static_cast<std::int64_t>(size_of(type));
    }
    std::int64_t scale_bytes() const { return quantized ? 4 * scale_blocks(shape.cols) : 0; } // bytes of a row
};

// choices[token * top_k + k]: an expert, -1 for a copy that is dropped.
using Choices = std::vector<std::int32_t>;
// Draws top_k experts for each token; with `skew` s, expert e is as likely as (e + 1)^-s before any is taken.
Choices draw_choices(const TokenShape& shape, double skew, std::uint64_t seed);

// One rank's operands, in the device's memory.
struct PeerRank {
    int device = 0;
    cudaStream_t stream = nullptr;
    PeerGroup group;
    char *x = nullptr, *rows = nullptr, *y = nullptr, *parts = nullptr;
    char *x_scale = nullptr, *row_scale = nullptr;
    std::int32_t *all_counts = nullptr, *row_of = nullptr, *places = nullptr;
    float *weight = nullptr, *probs = nullptr, *by_copy = nullptr;
};

class PeerRanks {
public:
    // Rank r on device r modulo `devices`; arenas hold 0xff, x random rows, weight random numbers.
    PeerRanks(const PeerCase& sizes, const std::vector<Choices>& choices, int devices);
    ~PeerRanks();
    PeerRanks(const PeerRanks&) = delete;
    PeerRanks& operator=(const PeerRanks&) = delete;

    const PeerCase& sizes() const { return sizes_; } // sizes with the capacity that was taken
    int count() const { return sizes_.ranks; }
    const PeerRank& operator[](int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
    const std::vector<std::int32_t>& all_counts() const { return all_counts_; }
    const std::vector<std::int32_t>& row_of(int rank) const { return row_of_[static_cast<std::size_t>(rank)]; }

    // Queues one op of one rank. forward: with the weights, and places are written.
    void dispatch(int rank, bool forward) const;
    void combine(int rank, bool with_values) const;
    void gather(int rank, const void* x, void* y, std::int64_t bytes) const;
    // Queues `op(rank)` for all ranks and waits; 0, or what a rank that was waited for too long left behind.
    template <class Op>
    int all(Op op) const {
        for (int r = 0; r < count(); ++r) op(r);
        return wait();
    }
    int wait() const;
    void poison(int rank) const; // makes whatever ops write 0xff

private:
    void count(const std::vector<Choices>& choices);
    void lay_out(int devices);

    PeerCase sizes_;
    std::vector<PeerRank> ranks_;
    std::vector<std::int32_t> all_counts_;
    std::vector<std::vector<std::int32_t>> row_of_;
    std::vector<char*> memory_;
    std::int64_t results_ = 0, arena_bytes_ = 0; // results_: offset of the first result in an arena
    int* trouble_ = nullptr;
};

// Bytes of one copy of random rows, the same for the same seed; values are about normal, never zero.
std::vector<char> random_rows(std::int64_t elements, Type type, std::uint64_t seed);

} // namespace moe::bench
