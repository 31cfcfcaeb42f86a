// Latent attention's heads in packs: a warp takes several heads of a token side by side, a block one or more tokens.
#include "kernels/cuda/rope/mla_packs.hpp"

#include "kernels/cuda/rope/rotation.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int most_rope = 256, threads = 256, warps = threads / warp_size, resident = 2; // resident: blocks per SM

// The shares that the warps of a block have of its tokens: even parts of their heads.
struct Shares {
    int of_token = 1, heads, tokens; // warps of a token, heads of a part, tokens of a block at a time
    // sides: heads that a warp can take side by side. Where warps of a token wait for each other they should be few, as
    // long as blocks go through so many rounds of tokens that they end together.
    Shares(const MlaRopeShape& s, int sides, bool wait) {
        const std::int64_t rounds = wait ? 4 : s.tokens;
        const std::int64_t all_warps = std::int64_t{multiprocessors()} * resident * warps;
        const int parts = (s.heads + sides - 1) / sides;
        while (of_token < parts && of_token < warps && s.tokens * of_token < rounds * all_warps) of_token *= 2;
        const int even = (parts + of_token - 1) / of_token * of_token;
        heads = (s.heads + even - 1) / even;
        tokens = warps / of_token;
    }
};

// The part that a warp works on at a time: heads of a token whose rotary packs lie side by side in its lanes, two packs
// that turn into each other per lane.
template <class A>
struct Part {
    static constexpr int W = A::width;
    int heads;         // heads of the token, from the first of this part on
    int pairs;         // lanes of a head
    int mine;          // head of this lane in the part
    int pair;          // number of the lane's packs, which hold pairs [pair W, pair W + W) of elements
    int first, second; // columns of the two packs among the rotary ones
    std::int64_t head; // number of the part's first head, among all heads of all tokens
    __device__ Part(const MlaRopeShape& s, std::int64_t token, int begin, int most)
        : pairs(s.rope / (2 * W)),
          mine(lane_of_warp() / pairs),
          pair(lane_of_warp() % pairs),
          first(s.interleaved ? 2 * pair * W : pair * W),
          second(s.interleaved ? first + W : first + s.rope / 2),
          head(token * s.heads + begin) {
        heads = begin + most <= s.heads ? most : s.heads - begin;
    }
    static Shares shares(const MlaRopeShape& s, bool wait) { return {s, warp_size / (s.rope / (2 * W)), wait}; }
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

// Turns of the tokens that a block has at a time, in turn in two buffers: one barrier lets none be overwritten before
// all have read it. The frequencies are the same for all tokens, and a power in double takes long.
struct Turns {
    using OfToken = Turn[most_rope / 2];
    float frequency[most_rope / 2];
    OfToken buffer[2][warps];
    __device__ void begin(const MlaRopeShape& s) {
        const int half = s.rope / 2;
        for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x))
            frequency[i] = frequency_of(i, half, s.theta, s.scale);
        __syncthreads();
    }
    // The turns of `count` tokens from `first` on, by token.
    __device__ const OfToken* at(const MlaRopeShape& s, const std::int32_t* positions, std::int64_t first, int count,
                                 int parity) {
        const int half = s.rope / 2;
        for (int i = static_cast<int>(threadIdx.x); i < count * half; i += static_cast<int>(blockDim.x)) {
            const int token = i / half, pair = i - token * half;
            if (first + token < s.tokens)
                buffer[parity][token][pair] = turn_of(positions[(first + token) / s.batch], frequency[pair],
                                                      static_cast<float>(s.scale.magnitude));
        }
        __syncthreads();
        return buffer[parity];
    }
};
// Takes the turns of this lane.
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

// Calls write(head, pack, read(head, pack)) for `packs` packs of each of a part's heads, which count among all tokens'.
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
__global__ void __launch_bounds__(threads, resident)
    mla_packs_kernel(MlaRopeShape s, Shares shares, Src q, Src kv, Src kv_down, const std::int32_t* positions,
                     Dst q_out, Dst k, Dst v) {
    constexpr int W = A::width;
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const int warp = static_cast<int>(threadIdx.x) / warp_size, token = warp / shares.of_token,
              begins = warp % shares.of_token * shares.heads;
    __shared__ Turns turns;
    turns.begin(s);
    int parity = 0;
    for (std::int64_t first = std::int64_t{blockIdx.x} * shares.tokens; first < s.tokens;
         first += std::int64_t{gridDim.x} * shares.tokens, parity ^= 1) {
        const Turn* const all = turns.at(s, positions, first, shares.tokens, parity)[token];
        const std::int64_t row = first + token;
        for (int begin = begins; begin < s.heads && row < s.tokens; begin += shares.of_token * shares.heads) {
            const Part<A> part(s, row, begin, shares.heads);
            const std::int64_t start = (part.head + part.mine) * qk + s.nope;
            TwoPacks<A> query, key; // Both are on their way with the first other packs.
            if (part.has_head()) {
                query.read(q, start, part);
                key.read(kv_down, row * (s.kv_lora + s.rope) + s.kv_lora, part);
            }
            move_heads<12>(
                part, static_cast<int>(source + (q.data != q_out.data ? s.nope : 0)) / W,
                [&](std::int64_t head, int pack) {
                    const std::int64_t column = pack * W;
                    return column < source ? A::take(kv, head * source + column)
                                           : A::take(q, head * qk + column - source);
                },
                [&](std::int64_t head, int pack, const typename A::Held& held) {
                    const std::int64_t column = pack * W;
                    if (column < s.nope) {
                        A::put(k, head * qk + column, held);
                    } else if (column < source) {
                        A::put(v, head * s.v + column - s.nope, held);
                    } else {
                        A::put(q_out, head * qk + column - source, held);
                    }
                });
            if (part.has_head()) {
                Turn turn[W];
                take_turns(all, part, turn);
                turn_into(query, turn, 1.0f, s.interleaved, q_out, start, part);
                turn_into(key, turn, 1.0f, s.interleaved, k, start, part);
            }
        }
    }
}

// The sums of a lane's packs over all its heads: a lane has the same columns in every part.
template <int W>
struct LaneSums {
    float a[W]{}, b[W]{};
    template <class A>
    __device__ void add(const TwoPacks<A>& held) {
#pragma unroll
        for (int j = 0; j < W; ++j) a[j] += held.a[j], b[j] += held.b[j];
    }
    // Adds up the sums of the warp's lanes that have the same columns, turned back: the angle is the same for all
    // heads.
    template <class A>
    __device__ void gather(const Part<A>& part, const Turn* all, bool interleaved) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
            for (int offset = part.pairs; offset < warp_size; offset *= 2) {
                a[j] += __shfl_xor_sync(all_lanes, a[j], offset);
                b[j] += __shfl_xor_sync(all_lanes, b[j], offset);
            }
        }
        Turn turn[W];
        take_turns(all, part, turn);
        apply_all(turn, -1.0f, interleaved, a, b);
    }
};

template <class A>
__global__ void __launch_bounds__(threads, resident)
    mla_grad_packs_kernel(MlaRopeShape s, Shares shares, Src dq_out, Src dk, Src dv, const std::int32_t* positions,
                          Dst dq, Dst dkv, Dst dkv_down) {
    constexpr int W = A::width;
    __shared__ Turns turns;
    __shared__ float sums[warps][most_rope];
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const int warp = static_cast<int>(threadIdx.x) / warp_size, token = warp / shares.of_token,
              begins = warp % shares.of_token * shares.heads;
    turns.begin(s);
    int parity = 0;
    for (std::int64_t first = std::int64_t{blockIdx.x} * shares.tokens; first < s.tokens;
         first += std::int64_t{gridDim.x} * shares.tokens, parity ^= 1) {
        const Turn* const all = turns.at(s, positions, first, shares.tokens, parity)[token]; // `sums` has been read.
        const std::int64_t row = first + token;
        LaneSums<W> keys;
        for (int begin = begins; begin < s.heads && row < s.tokens; begin += shares.of_token * shares.heads) {
            const Part<A> part(s, row, begin, shares.heads);
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
        const Part<A> part(s, row, 0, 1);
        const std::int64_t start = row * (s.kv_lora + s.rope) + s.kv_lora;
        keys.gather(part, all, s.interleaved);
        if (shares.of_token == 1) { // A warp that has its token alone waits for no other.
            if (part.has_head() && row < s.tokens)
                A::put(dkv_down, start + part.first, keys.a), A::put(dkv_down, start + part.second, keys.b);
            continue;
        }
        if (part.has_head()) {
#pragma unroll
            for (int j = 0; j < W; ++j) sums[warp][part.first + j] = keys.a[j], sums[warp][part.second + j] = keys.b[j];
        }
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < shares.tokens * static_cast<int>(s.rope); i += threads) {
            const int of = i / static_cast<int>(s.rope), column = i - of * static_cast<int>(s.rope);
            if (first + of >= s.tokens) break;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < warps; ++w) {
                if (w < shares.of_token) sum += sums[of * shares.of_token + w][column];
            }
            store(dkv_down, (first + of) * (s.kv_lora + s.rope) + s.kv_lora + column, sum);
        }
    }
}

// Calls run(Access) where every part of a head is whole packs.
template <class Run>
bool with_parts(const MlaRopeShape& s, std::initializer_list<Src> operands, std::int64_t latent, Run run) {
    bool done = false;
    with_access(operands, {s.nope, s.v, s.rope, latent}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            const int pairs = s.rope / (2 * A::width);
            if (s.query_scale.beta != 0.0 || s.rope % (2 * A::width) != 0 || s.rope > most_rope || pairs > warp_size ||
                (pairs & (pairs - 1)) != 0)
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
        const Shares shares = Part<decltype(access)>::shares(s, false);
        kernel<<<resident_blocks<kernel>(threads, s.tokens, shares.tokens), threads, 0, stream_of(stream)>>>(
            s, shares, q, kv, kv_down, positions, q_out, k, v);
    });
}

bool mla_rope_grad_packs(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq,
                         Dst dkv, Dst dkv_down, void* stream) {
    return with_parts(s, {dq_out, dk, dv, dq, dkv, dkv_down}, s.kv_lora, [&](auto access) {
        constexpr auto kernel = mla_grad_packs_kernel<decltype(access)>;
        const Shares shares = Part<decltype(access)>::shares(s, true);
        kernel<<<resident_blocks<kernel>(threads, s.tokens, shares.tokens), threads, 0, stream_of(stream)>>>(
            s, shares, dq_out, dk, dv, positions, dq, dkv, dkv_down);
    });
}

} // namespace moe::cuda
