// What threads of an ordered backward do beside its products: one loads, one waits for turns, one gives them on; and
// how sums leave and are kept.
#pragma once

#include "kernels/cuda/attention/attention_ordered.cuh"
#include "kernels/cuda/ptx/flags.cuh"

namespace moe::cuda::tensor_attention {

struct Maps {
    CUtensorMap q, k, v, dout;
};

struct Operands {
    const float *lse, *along; // [sequences, heads, rows]: log-sum-exp to the base 2, dout . o; rows of whole tiles
    float* sums;              // of dq, by tiles of queries; in a tile as threads hold them
    unsigned* turns;          // how many have added to a tile
    float* kept;              // of dk and dv, between the parts of a key head's query heads; as threads hold them
    Dst dk, dv;
};

// Sums that a thread leaves for itself, `slot` of the CTA's, and takes again.
template <bool keep, int n>
__device__ void move_kept(float* kept, int slot, float (&sums)[n]) {
    auto* const at = reinterpret_cast<float4*>(kept) + (std::int64_t{blockIdx.x} * 2 + slot) * (n / 4) * 2 * 128 +
                     (threadIdx.x - 128);
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
        if (keep) {
            __stcg(at + i * 2 * 128, float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
        } else {
            const float4 four = __ldcg(at + i * 2 * 128);
            sums[4 * i] = four.x, sums[4 * i + 1] = four.y, sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
        }
    }
}

template <bool causal, int qk_width>
using OrderedSteps = OrderedWalk<causal, keys_of_tile, queries_of_tile<qk_width>>;

__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline void store_matrices(unsigned row, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ inline void put_sums(float4* to, const float* x, bool first) {
    if (first)
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
    else
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                     "f"(x[2]), "f"(x[3])
                     : "memory");
}

// One thread loads.
template <bool causal, int qk_width, int v_width>
__device__ void produce(const OrderedLayout<qk_width, v_width>& at, const Maps& maps, const Operands& in,
                        OrderedSteps<causal, qk_width> walk) {
    using L = OrderedLayout<qk_width, v_width>;
    Ring ring;
    for (unsigned parity = 0; walk.next_keys(); parity ^= 1) {
        for (bool begins = true; walk.has_step(); walk.advance(), ring.advance(stages), begins = false) {
            const int stage = ring.stage, b = walk.sequence();
            const ptx::HeadBox query{0, walk.query(), walk.head(), b}, key{0, walk.key(), walk.key_head(), b};
            const std::int64_t row = walk.sums_tile() * L::queries;
            const unsigned numbers = ptx::shared_address(at.numbers_of(stage));
            ptx::wait(at.empty(stage), ring.parity ^ 1);
            if (begins) {
                ptx::wait(at.keys_empty(), parity ^ 1);
                ptx::arrive_expecting(at.keys_full(), L::Keys::bytes + L::Values::bytes);
                L::Keys::load(maps.k, key, at.keys(), at.keys_full());
            }
            ptx::arrive_expecting(at.full(stage), L::stage_bytes + L::numbers_bytes);
            L::Queries::load(maps.q, query, at.queries_of(stage), at.full(stage));
            ptx::load_bytes(numbers, in.lse + row, L::queries * 4, at.full(stage));
            if (begins) L::Values::load(maps.v, key, at.values(), at.keys_full());
            L::Results::load(maps.dout, query, at.results_of(stage), at.full(stage));
            ptx::load_bytes(numbers + L::queries * 4, in.along + row, L::queries * 4, at.full(stage));
        }
    }
}

// One thread waits for turns, up to four steps ahead, and one gives them on.
template <bool causal, int qk_width, int v_width>
__device__ void await_turns(const OrderedLayout<qk_width, v_width>& at, const Operands& in,
                            OrderedSteps<causal, qk_width> walk) {
    for (Ring ring; walk.next_keys();) {
        for (; walk.has_step(); walk.advance(), ring.advance(turns_deep)) {
            const std::int64_t tile = walk.sums_tile();
            const auto turn = static_cast<unsigned>(walk.turn());
            ptx::wait(at.turn_given(ring.stage), ring.parity ^ 1);
            while (turn != 0 && ptx::acquire_in_device(in.turns + tile) != turn) {
            }
            const float* sums = in.sums + tile * (queries_of_tile<qk_width> * qk_width);
            at.sums_of(ring.stage) = reinterpret_cast<std::uint64_t>(sums) | (turn == 0 ? 1 : 0);
            ptx::arrive(at.turn_come(ring.stage));
        }
    }
}
template <bool causal, int qk_width, int v_width>
__device__ void give_turns(const OrderedLayout<qk_width, v_width>& at, const Operands& in,
                           OrderedSteps<causal, qk_width> walk) {
    for (Ring ring; walk.next_keys();) {
        for (; walk.has_step(); walk.advance(), ring.advance(turns_deep)) {
            ptx::wait(at.turn_over(ring.stage), ring.parity);
            __threadfence();
            ptx::release_in_device(in.turns + walk.sums_tile(), static_cast<unsigned>(walk.turn()) + 1);
            ptx::arrive(at.turn_given(ring.stage));
        }
    }
}

} // namespace moe::cuda::tensor_attention
