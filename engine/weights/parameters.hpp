// Weights by their global names: initial values, and how a rank's flat shards map to global tensors.
#pragma once

#include "engine/device/arena.hpp"
#include "kernels/kernels.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/program.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::weights {

// The key of a weight's deviates (Kernels::draw_normal): they are the same under every plan.
std::uint64_t random_stream(std::uint64_t seed, const std::string& name);

// A run of elements of one global tensor that this rank's optimizer shard holds, within one row where columns are cut.
struct Piece {
    std::int64_t shard = 0;  // first element of the piece in the bucket's shard [elements / group_size]
    std::int64_t global = 0; // first element of the piece in the global tensor [rows, cols]
    std::int64_t count = 0;
};

// A weight as one rank sees it.
struct LocalParameter {
    std::string name;                // name with the global expert index
    std::int64_t rows = 0, cols = 1; // shape of the global tensor
    int bucket = 0;
    program::Init init = program::Init::normal;
    double init_std = 0.0;
    bool copy = false;         // whether another rank speaks for it: another stage's, or the first that holds it
    int moments = 2;           // 1: Muon's, without exp_avg_sq; 0: of a frozen weight
    std::vector<Piece> pieces; // Padding rows belong to no piece.
};

// Every parameter of a rank's Program, in the Program's order. Ranks that hold copies of a weight hold disjoint pieces
// of it; the pieces of all ranks, those of a `copy` aside, cover every global tensor exactly once.
std::vector<LocalParameter> local_parameters(const program::Program& program, const plan::Mesh& mesh, int rank);

// The states that are kept of each parameter: the FP32 master weight and AdamW's moments (Muon has exp_avg alone), and
// where the run averages its weights that average, which lies in no bucket.
enum class StateKind : std::uint8_t { weight, exp_avg, exp_avg_sq, average };
inline constexpr int state_kind_count = 4;
inline constexpr StateKind state_kinds[] = {StateKind::weight, StateKind::exp_avg, StateKind::exp_avg_sq,
                                            StateKind::average};
// The kinds that a run has of a weight with so many moments.
inline std::vector<StateKind> kinds_of(bool averages, int moments = 2) {
    std::vector<StateKind> kinds{StateKind::weight};
    if (moments > 0) kinds.push_back(StateKind::exp_avg);
    if (moments > 1) kinds.push_back(StateKind::exp_avg_sq);
    if (averages) kinds.push_back(StateKind::average);
    return kinds;
}
const char* to_string(StateKind kind);

// Writes initial weights, FP32 masters (not rounded to the stored precision) and zero moments of a rank's own shards.
// Parts that the other members of a bucket's group hold arrive with the gather at the start of the step. They are drawn
// by a device's `kernels` where its queue is, elsewhere by `threads` threads; the values depend on neither.
void initialize_parameters(const program::Program& program, const std::vector<LocalParameter>& parameters,
                           const device::Arena& arena, const Kernels& kernels, std::uint64_t seed, int threads);

// Zeros in moments of MXFP8, before stored ones come piece by piece: what a block held would coarsen them.
void clear_blocks(const program::Program& program, const device::Arena& arena);

// Stores FP32 values into a shard of weights (FP32 or BF16, rounded to nearest even) and, as they are, its master.
void store_weights(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                   std::int64_t first, const float* values, std::int64_t count);
// Elements [first, first + count) of a shard's state as FP32, exactly, and back (a weight as store_weights() does).
void load_state(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                StateKind kind, std::int64_t first, float* values, std::int64_t count);
void store_state(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                 StateKind kind, std::int64_t first, const float* values, std::int64_t count);

} // namespace moe::weights
