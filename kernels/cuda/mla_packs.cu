// Latent attention's heads in packs: a block takes token by token, and each of its warps several heads side by side.
#include "kernels/cuda/mla_packs.hpp"

#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int most_rope = 256, threads = 256, warps = threads / warp_size;

// What a warp works on at a time: as many heads of a token as hold their rotary packs side by side in its lanes, two
// packs that turn into each other per lane.
template <class A>
struct Part {
    static constexpr int W = A::width;
    int heads;         // of the token, from the first of this part on
    int pairs;         // lanes of a head
    int mine;          // this lane's head
    int pair;          // of its packs, which hold pairs [pair W, pair W + W) of elements
    int first, second; // columns of the two packs among the rotary ones
    std::int64_t head; // the first, among all heads of all tokens
    __device__ Part(const MlaRopeShape& s, std::int64_t token, int begin)
        : pairs(s.rope / (2 * W)),
          mine(lane_of_warp() / pairs),
          pair(lane_of_warp() % pairs),
          first(s.interleaved ? 2 * pair * W : pair * W),
          second(s.interleaved ? first + W : first + s.rope / 2),
          head(token * s.heads + begin) {
        heads = begin + sides(s) <= s.heads ? sides(s) : s.heads - begin;
    }
    static __device__ int sides(const MlaRopeShape& s) { return warp_size / (s.rope / (2 * W)); }
    __device__ bool has_head() const { return mine < heads; }
};

template <class A>
struct TwoPacks {
    typename A::Held a, b;
    __device__ void read(Src from, std::int64_t start, const Part<A>& part) {
        a = A::take(from, start + part.first), b = A::take(from, start + part.second);
    }
    __device__ void turn(const Turn (&turn)[A::width], float sign, bool interleaved, float (&x)[A::width],
                         float (&y)[A::width]) const {
#pragma unroll
        for (int j = 0; j < A::width; ++j) x[j] = a[j], y[j] = b[j];
        apply_all(turn, sign, interleaved, x, y);
    }
};
template <class A>
__device__ void turn_into(const TwoPacks<A>& held, const Turn (&turn)[A::width], float sign, bool interleaved, Dst to,
                          std::int64_t start, const Part<A>& part) {
    float x[A::width], y[A::width];
    held.turn(turn, sign, interleaved, x, y);
    A::put(to, start + part.first, x);
    A::put(to, start + part.second, y);
}

// Turns of the tokens of a block, in turn in two buffers: one barrier per token lets none be overwritten before all
// have read it. The frequencies are the same for all tokens, and a power in double takes long.
struct Turns {
    float frequency[most_rope / 2];
    Turn buffer[2][most_rope / 2];
    __device__ void begin(const MlaRopeShape& s) {
        const int half = s.rope / 2;
        for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x))
            frequency[i] = frequency_of(i, half, s.theta, s.scale);
        __syncthreads();
    }
    __device__ const Turn* at(const MlaRopeShape& s, std::int32_t position, int parity) {
        for (int i = static_cast<int>(threadIdx.x); i < s.rope / 2; i += static_cast<int>(blockDim.x))
            buffer[parity][i] = turn_of(position, frequency[i], static_cast<float>(s.scale.magnitude));
        __syncthreads();
        return buffer[parity];
    }
};
// Those of this lane.
template <class A>
__device__ void take_turns(const Turn* all, const Part<A>& part, Turn (&turn)[A::width]) {
#pragma unroll
    for (int j = 0; j < A::width; ++j) turn[j] = all[part.pair * A::width + j];
}

// A pack of a part's heads by its number: which head, and which of the head's packs. Exact below 2^31 / packs, and
// several times faster than a division.
struct Place {
    int head, pack;
    __device__ Place(int number, int packs, unsigned inverse)
        : head(static_cast<int>((static_cast<unsigned long long>(number) * inverse) >> 31)),
          pack(number - head * packs) {}
    static __device__ unsigned inverse_of(int packs) { return ((1u << 31) + packs - 1) / static_cast<unsigned>(packs); }
};

// write(head, pack, read(head, pack)) for `packs` packs of each of a part's heads, which count among all tokens'.
template <int together, class A, class Read, class Write>
__device__ void move_heads(const Part<A>& part, int packs, Read read, Write write) {
    const unsigned inverse = Place::inverse_of(packs);
    for_each_pack<together>(
        part.heads * packs,
        [&](int number) {
            const Place at(number, packs, inverse);
            return read(part.head + at.head, at.pack);
        },
        [&](int number, const typename A::Held& held) {
            const Place at(number, packs, inverse);
            write(part.head + at.head, at.pack, held);
        });
}

// The columns of a part's heads that no position turns, `width` in rows of `stride` elements on both sides.
template <class A>
__device__ void move_plain(const Part<A>& part, int width, std::int64_t stride, Src from, Dst to) {
    move_heads<4>(
        part, width / A::width,
        [&](std::int64_t head, int pack) { return A::take(from, head * stride + pack * A::width); },
        [&](std::int64_t head, int pack, const typename A::Held& held) {
            A::put(to, head * stride + pack * A::width, held);
        });
}

template <class A>
__global__ void __launch_bounds__(threads, 2) mla_packs_kernel(MlaRopeShape s, Src q, Src kv, Src kv_down,
                                                               const std::int32_t* positions, Dst q_out, Dst k, Dst v) {
    constexpr int W = A::width;
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const int warp = static_cast<int>(threadIdx.x) / warp_size, sides = Part<A>::sides(s);
    __shared__ Turns turns;
    turns.begin(s);
    int parity = 0;
    for (std::int64_t row = blockIdx.x; row < s.tokens; row += gridDim.x, parity ^= 1) {
        const Turn* const all = turns.at(s, positions[row / s.batch], parity);
        for (int begin = warp * sides; begin < s.heads; begin += warps * sides) {
            const Part<A> part(s, row, begin);
            if (part.has_head()) {
                const std::int64_t start = (part.head + part.mine) * qk + s.nope;
                TwoPacks<A> query, key;
                query.read(q, start, part);
                key.read(kv_down, row * (s.kv_lora + s.rope) + s.kv_lora, part);
                Turn turn[W];
                take_turns(all, part, turn);
                turn_into(query, turn, 1.0f, s.interleaved, q_out, start, part);
                turn_into(key, turn, 1.0f, s.interleaved, k, start, part);
            }
            move_heads<8>(
                part, static_cast<int>(source) / W,
                [&](std::int64_t head, int pack) { return A::take(kv, head * source + pack * W); },
                [&](std::int64_t head, int pack, const typename A::Held& held) {
                    const int column = pack * W;
                    if (column < s.nope) {
                        A::put(k, head * qk + column, held);
                    } else {
                        A::put(v, head * s.v + column - s.nope, held);
                    }
                });
            if (q.data != q_out.data) move_plain(part, s.nope, qk, q, q_out);
        }
    }
}

// What a lane's packs of all its heads add up to: a lane has the same columns in every part.
template <int W>
struct LaneSums {
    float a[W]{}, b[W]{};
    template <class A>
    __device__ void add(const TwoPacks<A>& held) {
#pragma unroll
        for (int j = 0; j < W; ++j) a[j] += held.a[j], b[j] += held.b[j];
    }
    // sums[rope] = those of the warp's lanes that have the same columns.
    template <class A>
    __device__ void gather(const Part<A>& part, float* sums) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
            for (int offset = part.pairs; offset < warp_size; offset *= 2) {
                a[j] += __shfl_xor_sync(all_lanes, a[j], offset);
                b[j] += __shfl_xor_sync(all_lanes, b[j], offset);
            }
            if (part.mine == 0) sums[part.first + j] = a[j], sums[part.second + j] = b[j];
        }
    }
};

template <class A>
__global__ void __launch_bounds__(threads, 2)
    mla_grad_packs_kernel(MlaRopeShape s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq, Dst dkv,
                          Dst dkv_down) {
    constexpr int W = A::width;
    __shared__ Turns turns;
    __shared__ float sums[warps][most_rope];
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const int warp = static_cast<int>(threadIdx.x) / warp_size, sides = Part<A>::sides(s);
    turns.begin(s);
    int parity = 0;
    for (std::int64_t row = blockIdx.x; row < s.tokens; row += gridDim.x, parity ^= 1) {
        const Turn* const all = turns.at(s, positions[row / s.batch], parity); // and `sums` has been read
        LaneSums<W> keys;
        for (int begin = warp * sides; begin < s.heads; begin += warps * sides) {
            const Part<A> part(s, row, begin);
            if (part.has_head()) {
                const std::int64_t start = (part.head + part.mine) * qk + s.nope;
                TwoPacks<A> query, key;
                query.read(dq_out, start, part);
                key.read(dk, start, part);
                Turn turn[W];
                take_turns(all, part, turn);
                turn_into(query, turn, -1.0f, s.interleaved, dq, start, part);
                keys.add(key);
            }
            move_heads<8>(
                part, static_cast<int>(source) / W,
                [&](std::int64_t head, int pack) {
                    const int column = pack * W;
                    return column < s.nope ? A::take(dk, head * qk + column)
                                           : A::take(dv, head * s.v + column - s.nope);
                },
                [&](std::int64_t head, int pack, const typename A::Held& held) {
                    A::put(dkv, head * source + pack * W, held);
                });
            if (dq.data != dq_out.data) move_plain(part, s.nope, qk, dq_out, dq);
        }
        keys.gather(Part<A>(s, row, 0), sums[warp]);
        __syncthreads();
        // The angle is the same for all heads: turning their sum back is turning each back.
        const std::int64_t start = row * (s.kv_lora + s.rope) + s.kv_lora;
        for (int i = static_cast<int>(threadIdx.x); i < s.rope / 2; i += threads) {
            const Pair at(i, s.rope / 2, s.interleaved);
            float x = 0.0f, y = 0.0f;
#pragma unroll
            for (int w = 0; w < warps; ++w) x += sums[w][at.first], y += sums[w][at.second];
            apply(all[i], -1.0f, x, y);
            store(dkv_down, start + at.first, x);
            store(dkv_down, start + at.second, y);
        }
    }
}

// run(Access) where every part of a head is whole packs.
template <class Run>
bool with_parts(const MlaRopeShape& s, std::initializer_list<Src> operands, std::int64_t latent, Run run) {
    bool done = false;
    with_access(operands, {s.nope, s.v, s.rope, latent}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            const int pairs = s.rope / (2 * A::width);
            if (s.rope % (2 * A::width) != 0 || s.rope > most_rope || pairs > warp_size || (pairs & (pairs - 1)) != 0)
                return;
            done = true;
            run(access);
            CUDA_CHECK(cudaGetLastError());
        }
    });
    return done;
}

} // namespace

bool mla_rope_packs(const MlaRopeShape& s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k,
                    Dst v, void* stream) {
    return with_parts(s, {q, kv, kv_down, q_out, k, v}, s.kv_lora, [&](auto access) {
        constexpr auto kernel = mla_packs_kernel<decltype(access)>;
        kernel<<<resident_blocks<kernel>(threads, s.tokens, 1), threads, 0, stream_of(stream)>>>(
            s, q, kv, kv_down, positions, q_out, k, v);
    });
}

bool mla_rope_grad_packs(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq,
                         Dst dkv, Dst dkv_down, void* stream) {
    return with_parts(s, {dq_out, dk, dv, dq, dkv}, 0, [&](auto access) {
        constexpr auto kernel = mla_grad_packs_kernel<decltype(access)>;
        kernel<<<resident_blocks<kernel>(threads, s.tokens, 1), threads, 0, stream_of(stream)>>>(
            s, dq_out, dk, dv, positions, dq, dkv, dkv_down);
    });
}

} // namespace moe::cuda
