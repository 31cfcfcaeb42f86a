// Who adds to which gradients of queries, and when: the order of an attention backward whose CTAs each have a tile of
// keys.
//
// CTAs of one key head add to the same tiles of queries, each in its turn. Turns follow the order in which they come by
// if all go at one pace, so that nobody waits long (for the aim: Qiang et al., DASH, arXiv:2601.21824):
// * Full: each begins at its own share of the queries and goes round.
// * Causal: a CTA has tile n - 1 - i and then tile i, which are equal work, from the diagonal on. Of the first tiles
//   the last is through soonest, of the second ones the first.
#pragma once

#include "kernels/cuda/attention/attention_tensor.cuh"

namespace moe::cuda::tensor_attention {

inline constexpr int stages = 2, keys_of_tile = 128;
inline constexpr int turns_deep = 4; // steps between one that waits for its turn and one that has given it on
// Queries of a tile: dq is 64 x 64 of a warpgroup at a time.
template <int qk_width>
inline constexpr int queries_of_tile = qk_width == 64 ? 128 : 64;

struct OrderedPlan {
    int key_tiles, query_tiles;
    int team;     // CTAs of a key head: a tile of keys each, or under a causal mask two
    int teams;    // teams at a time
    int groups;   // key heads of all sequences
    int shift;    // keys in front of the first query's own
    int together; // query heads of a key head that a team goes through at a time
};

// A CTA's steps: its key heads, of each `together` query heads at a time, of these one or two tiles of keys, of each
// the query heads, of each the query tiles.
template <bool causal, int keys, int queries>
class OrderedWalk {
public:
    __device__ OrderedWalk(const AttentionShape& s, const OrderedPlan& plan)
        : p_(plan),
          kv_heads_(s.kv_heads),
          sharers_(s.heads / s.kv_heads),
          member_(static_cast<int>(blockIdx.x) % plan.team),
          group_(static_cast<int>(blockIdx.x) / plan.team) {}

    // The next tile of keys; false behind the last.
    __device__ bool next_keys() {
        if (++pass_ == (causal ? 2 : 1)) next_heads();
        if (causal && pass_ == 1 && 2 * member_ + 1 == p_.key_tiles) next_heads(); // the middle one
        if (group_ >= p_.groups) return false;
        tile_ = causal && pass_ == 0 ? p_.key_tiles - 1 - member_ : member_;
        const int seen_from = tile_ * keys - p_.shift;
        first_ = causal && seen_from > 0 ? seen_from / queries : 0;
        begin_ = causal ? first_ : static_cast<int>(std::int64_t{tile_} * p_.query_tiles / p_.key_tiles);
        left_ = (p_.query_tiles - first_) * (ends_keys() ? sharers_ - heads_ : p_.together);
        query_tile_ = begin_, head_ = key_head() * sharers_ + heads_;
        return true;
    }
    __device__ bool has_step() const { return left_ > 0; }
    __device__ bool is_last() const { return left_ == 1; }
    __device__ void advance() {
        --left_;
        if (++query_tile_ == p_.query_tiles) query_tile_ = first_;
        if (query_tile_ == begin_) ++head_;
    }

    // Whether these are the first of the heads that share the keys, and whether they are the last.
    __device__ bool begins_keys() const { return heads_ == 0; }
    __device__ bool ends_keys() const { return heads_ + p_.together >= sharers_; }
    __device__ int pass() const { return pass_; }

    __device__ int sequence() const { return group_ / kv_heads_; }
    __device__ int key_head() const { return group_ % kv_heads_; }
    __device__ int key() const { return tile_ * keys; }
    __device__ int head() const { return head_; }
    __device__ int query() const { return query_tile_ * queries; }
    // The number of a tile of queries among those of all heads and sequences.
    __device__ std::int64_t sums_tile() const {
        return (std::int64_t{sequence()} * kv_heads_ * sharers_ + head_) * p_.query_tiles + query_tile_;
    }
    // How many add to the tile of queries before this CTA.
    __device__ int turn() const {
        const int n = p_.key_tiles;
        if constexpr (causal) {
            const int seen = (query() + queries - 1 + p_.shift) / keys, last = seen < n ? seen : n - 1;
            const int seconds = n - p_.team, firsts = last - seconds + 1; // of those that add
            return tile_ >= seconds ? last - tile_ : (firsts > 0 ? firsts : 0) + tile_;
        } else {
            // Tiles of keys that began at this tile of queries or at one before.
            const auto begun =
                static_cast<int>((std::int64_t{query_tile_ + 1} * n + p_.query_tiles - 1) / p_.query_tiles);
            const int m = begun < n ? begun : n;
            return tile_ < m ? m - 1 - tile_ : n - 1 - tile_ + m;
        }
    }

private:
    __device__ void next_heads() {
        pass_ = 0;
        if ((heads_ += p_.together) >= sharers_) heads_ = 0, group_ += p_.teams;
    }

    const OrderedPlan& p_;
    int kv_heads_, sharers_, member_, group_;
    int pass_ = -1, heads_ = 0, tile_ = 0, first_ = 0, begin_ = 0, left_ = 0, query_tile_ = 0, head_ = 0;
};

// Shared memory: a tile of keys, stages of queries, score gradients twice, what belongs to turns.
template <int qk_width, int v_width>
struct OrderedLayout {
    static constexpr int queries = queries_of_tile<qk_width>;
    using Keys = TileOf<keys_of_tile, qk_width>;
    using Values = TileOf<keys_of_tile, v_width>;
    using Queries = TileOf<queries, qk_width>;
    using Results = TileOf<queries, v_width>;
    using Scores = TileOf<keys_of_tile, queries>; // gradients, [keys, queries]
    static constexpr int alignment = 1024, numbers_bytes = 2 * queries * 4;
    static constexpr int stage_bytes = Queries::bytes + Results::bytes;
    static constexpr int stages_at = Keys::bytes + Values::bytes, scores_at = stages_at + stages * stage_bytes;
    static constexpr int numbers_at = scores_at + 2 * Scores::bytes;
    static constexpr int sums_at = numbers_at + stages * numbers_bytes, barriers_at = sums_at + turns_deep * 8;
    static constexpr int shared_bytes = alignment + barriers_at + 8 * (2 + 2 * stages + 3 * turns_deep);
    unsigned char* memory;
    unsigned start;

    __device__ explicit OrderedLayout(unsigned char* shared) {
        const unsigned address = ptx::shared_address(shared);
        start = (address + alignment - 1) / alignment * alignment;
        memory = shared + (start - address);
    }
    __device__ unsigned keys() const { return start; }
    __device__ unsigned values() const { return start + Keys::bytes; }
    __device__ unsigned queries_of(int stage) const { return start + stages_at + stage * stage_bytes; }
    __device__ unsigned results_of(int stage) const { return queries_of(stage) + Queries::bytes; }
    __device__ unsigned scores(int half) const { return start + scores_at + half * Scores::bytes; }
    __device__ const float* numbers_of(int stage) const {
        return reinterpret_cast<const float*>(memory + numbers_at + stage * numbers_bytes);
    }
    // Where the sums of a turn go; odd: they are the first.
    __device__ volatile std::uint64_t& sums_of(int turn) const {
        return reinterpret_cast<volatile std::uint64_t*>(memory + sums_at)[turn];
    }
    __device__ unsigned barrier(int i) const { return start + barriers_at + 8 * i; }
    __device__ unsigned full(int stage) const { return barrier(stage); }
    __device__ unsigned empty(int stage) const { return barrier(stages + stage); }
    __device__ unsigned keys_full() const { return barrier(2 * stages); }
    __device__ unsigned keys_empty() const { return barrier(2 * stages + 1); }
    __device__ unsigned turn_come(int turn) const { return barrier(2 * stages + 2 + turn); }
    __device__ unsigned turn_over(int turn) const { return barrier(2 * stages + 2 + turns_deep + turn); }
    // Without it a barrier could be two phases ahead of the thread that gives turns on, which would wait for ever.
    __device__ unsigned turn_given(int turn) const { return barrier(2 * stages + 2 + 2 * turns_deep + turn); }
    __device__ void begin() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; ++i) ptx::init_barrier(full(i), 1), ptx::init_barrier(empty(i), 4 * consumers);
            ptx::init_barrier(keys_full(), 1), ptx::init_barrier(keys_empty(), 4 * consumers);
            for (int i = 0; i < turns_deep; ++i) {
                ptx::init_barrier(turn_come(i), 1), ptx::init_barrier(turn_over(i), 4 * consumers);
                ptx::init_barrier(turn_given(i), 1);
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
};

} // namespace moe::cuda::tensor_attention
