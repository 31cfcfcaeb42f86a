// Routed tokens between ranks whose devices read and write each other's memory: dispatch, combine, small gathers.
//
// Every rank of the group calls the same functions in the same order, each on one stream of its own. A call waits on
// the device until all have come to it, since its results are written by the others, and returns on the device when
// its own results are complete. Nothing is read by the host, so calls can be captured and replayed as CUDA graphs.
#pragma once

#include "kernels/kernels.hpp"

namespace moe {

// A lane of a warp holds a copy of a token, and another one each rank's part: most_peers + most_choices lanes.
inline constexpr int most_peers = 8, most_choices = 24;

struct PeerGroup {
    int ranks = 1, rank = 0;
    // Arenas by rank, as this device addresses them. Operands that others read or write lie at one offset in all of
    // them.
    char* arena[most_peers] = {};
    // Flags and numbers of calls, board_bytes() each, zero before the first call; for one stream at a time.
    char* board[most_peers] = {};
    int blocks = 24; // multiprocessors that a call takes at most, the same at all ranks
    // A call that waits longer than that many seconds for a rank writes 1 + that rank to the host's pinned memory and
    // goes on with whatever lies there; 0: waits for ever.
    double patience = 0.0;
    int* trouble = nullptr;
};

// [tokens, top_k] choices on every rank; rows of `cols` elements that are whole 16 bytes, at most `capacity` on the
// expert side. Rank r has the experts [r * experts / ranks, (r + 1) * experts / ranks).
struct TokenShape {
    std::int64_t tokens = 0, cols = 0, capacity = 0;
    int top_k = 0, experts = 0;
    // Rows that a rank of another token's sums get to one rank: parts of combine.
    std::int64_t parts_of(int ranks) const { return tokens * (top_k < ranks ? top_k : ranks); }
};

// Functions throw std::runtime_error for a CUDA error and for sizes beyond the limits above.
struct PeerKernels {
    // Bytes of a board with the flags of calls of up to so many tokens.
    std::int64_t (*board_bytes)(int ranks, std::int64_t tokens) = nullptr;
    // x[tokens, cols] -> rows[capacity, cols]: each copy's row to its place in expert-major order at the rank of its
    // expert, one row per token and rank over the link; weight[tokens, top_k] -> probs[capacity] with them.
    // places[ranks * tokens, top_k] says for the tokens of every rank where their copies lie here; a copy that is not
    // here has -1 - (ranks below this one that have copies of the token). Written with `weight`, else of a call before.
    // all_counts[ranks, experts] and row_of[tokens * top_k] are those of kernels.hpp.
    void (*dispatch)(const PeerGroup& group, const TokenShape& shape, Src x, const std::int32_t* all_counts,
                     const std::int32_t* row_of, const float* weight, Dst rows, float* probs, std::int32_t* places,
                     void* stream) = nullptr;
    // Dispatches rows in E4M3 (Fp8Rows), whose scales go where they go. Whole 16 bytes of them: cols is a multiple of
    // 512.
    void (*dispatch_quantized)(const PeerGroup& group, const TokenShape& shape, const std::uint8_t* x,
                               const float* x_scale, const std::int32_t* all_counts, const std::int32_t* row_of,
                               const float* weight, std::uint8_t* rows, float* row_scale, float* probs,
                               std::int32_t* places, void* stream) = nullptr;
    // The way back, which is dispatch's gradient: y[tokens, cols] = sums of the rows of a token's copies, in FP32 on
    // each rank that has some, and of those sums, which travel in the storage of y, through parts[parts_of(ranks),
    // cols]. [values[capacity]] -> [by_copy[tokens, top_k]]: one value per copy, 0 for dropped ones.
    void (*combine)(const PeerGroup& group, const TokenShape& shape, Src rows, const std::int32_t* all_counts,
                    const std::int32_t* row_of, const std::int32_t* places, const float* values, Dst y, Dst parts,
                    float* by_copy, void* stream) = nullptr;
    // x[bytes] of every rank -> y[ranks * bytes]; for a few KiB, in steps of 4 bytes.
    void (*gather)(const PeerGroup& group, const void* x, void* y, std::int64_t bytes, void* stream) = nullptr;
};

} // namespace moe
