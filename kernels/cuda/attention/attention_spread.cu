// A step of ring attention as one rectangle of queries and keys, so that a library can take it.
//
// Rank r holds, of 2R runs, numbers r and 2R - 1 - r. Its own keys make a causal square of both runs; of an earlier
// rank all its queries see the first run and none the second; of a later rank its second run sees both and its first
// none.
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/attention_library.hpp"

#include <optional>

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr std::int64_t most_blocks = 4096;

struct Rectangle { // queries and keys of one sequence
    std::int64_t query, queries, key, keys;
    bool causal;
};

// The rectangle of a call; none where its runs do not lie so.
std::optional<Rectangle> rectangle_of(const AttentionShape& s) {
    const std::int64_t run = s.seq_q / 2, own[2] = {s.q_start[0], s.q_start[1]},
                       other[2] = {s.k_start[0], s.k_start[1]};
    if (!s.causal || s.window > 0 || s.seq_q != s.seq_k || own[0] + run > own[1]) return std::nullopt;
    if (own[0] == other[0] && own[1] == other[1]) return Rectangle{0, s.seq_q, 0, s.seq_k, true};
    if (other[0] + run <= own[0] && other[1] >= own[1] + run) return Rectangle{0, s.seq_q, 0, run, false};
    if (other[0] >= own[0] + run && other[1] + run <= own[1]) return Rectangle{run, run, 0, s.seq_k, false};
    return std::nullopt;
}

AttentionCall call_of(const AttentionSizes& z, const Rectangle& r, Src q, Src k, Src v) {
    AttentionCall c;
    c.s = z.s;
    c.s.spread = c.s.merge = false;
    c.s.causal = r.causal, c.s.seq_q = r.queries, c.s.seq_k = r.keys;
    c.q = q + (z.s.q_offset + r.query * z.s.batch * z.q_stride);
    c.k = k + (z.s.k_offset + r.key * z.s.batch * z.k_stride);
    c.v = v + (z.s.v_offset + r.key * z.s.batch * z.v_stride);
    c.lse_head = z.s.seq_q * z.s.batch;
    return c;
}

template <class Run>
__device__ void for_each_of(std::int64_t n, Run run) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) run(i);
}

// Two results over different keys: lse and more_lse are the logarithms of their softmaxes' sums.
struct Merge {
    Dst o;                 // [rows, heads * dim]
    Src more;              // [rows, heads * dim]
    float* lse;            // [heads, lse_head]
    const float* more_lse; // [heads, rows]
    std::int64_t rows, lse_head;
    int heads, dim;
};

__global__ void merge_rows_kernel(Merge m) {
    const std::int64_t width = std::int64_t{m.heads} * m.dim;
    for_each_of(m.rows * width, [&](std::int64_t i) {
        const std::int64_t row = i / width, head = i % width / m.dim;
        const float before = m.lse[head * m.lse_head + row], more = m.more_lse[head * m.rows + row];
        const float share = 1.0f / (1.0f + expf(before - more)); // share of the keys that came last
        const float old = load(read_back(m.o), i);
        store(m.o, i, old + share * (load(m.more, i) - old));
    });
}

// After the rows: those read what this one overwrites.
__global__ void merge_lse_kernel(Merge m) {
    for_each_of(m.rows * m.heads, [&](std::int64_t i) {
        float& lse = m.lse[i / m.rows * m.lse_head + i % m.rows];
        const float more = m.more_lse[i], high = fmaxf(lse, more), low = fminf(lse, more);
        lse = high + log1pf(expf(low - high));
    });
}

// y[row, from + col] += x[row, col]
__global__ void add_rows_kernel(Dst y, Src x, std::int64_t n, std::int64_t cols, std::int64_t stride) {
    for_each_of(n, [&](std::int64_t i) {
        const std::int64_t at = i / cols * stride + i % cols;
        store(y, at, load(read_back(y), at) + load(x, i));
    });
}

__global__ void clear_rows_kernel(Dst y, std::int64_t n, std::int64_t cols, std::int64_t stride) {
    for_each_of(n, [&](std::int64_t i) { store(y, i / cols * stride + i % cols, 0.0f); });
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), std::int64_t elements, cudaStream_t stream, Arguments... arguments) {
    kernel<<<blocks_for(elements, threads, most_blocks), threads, 0, stream>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

bool spread_attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, cudaStream_t stream) {
    const AttentionSizes z(s);
    const std::optional<Rectangle> r = rectangle_of(s);
    const bool blind = r && r->queries < s.seq_q && !s.merge; // whether some queries have seen no key yet
    if (!r || blind || (s.merge && sinks.data != nullptr)) return false;
    AttentionCall call = call_of(z, *r, q, k, v);
    if (!s.merge) return library_attention(call, sinks, o, lse, stream);
    const std::int64_t rows = r->queries * s.batch, width = std::int64_t{s.heads} * s.v_dim,
                       more_bytes = (rows * width * 2 + 255) / 256 * 256;
    char* memory = library_scratch(stream, more_bytes + rows * s.heads * 4);
    const Dst more{memory, Type::bf16};
    auto* more_lse = reinterpret_cast<float*>(memory + more_bytes);
    call.lse_head = rows;
    if (!library_attention(call, {}, more, more_lse, stream)) return false;
    const std::int64_t first = r->query * s.batch;
    const Merge merge{o + first * width, more, lse + first, more_lse, rows, s.seq_q * s.batch, s.heads, s.v_dim};
    launch(merge_rows_kernel, rows * width, stream, merge);
    launch(merge_lse_kernel, rows * s.heads, stream, merge);
    return true;
}

bool spread_attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Dst dq,
                           Dst dk, Dst dv, cudaStream_t stream) {
    const AttentionSizes z(s);
    const std::optional<Rectangle> r = rectangle_of(s);
    if (!r) return false;
    AttentionCall call = call_of(z, *r, q, k, v);
    const std::int64_t first = r->query * s.batch, rows = r->queries * s.batch, cols = std::int64_t{s.heads} * s.qk_dim,
                       o_at = first * s.heads * s.v_dim;
    Dst to = dq + (s.q_offset + first * z.q_stride), sum = to;
    if (s.merge) {
        call.dq_stride = cols;
        to = {library_scratch(stream, rows * cols * 2), Type::bf16};
    }
    dk = dk + s.k_offset, dv = dv + s.v_offset; // Every rectangle holds the first run.
    if (!library_attention_grad(call, dout + o_at, o + o_at, lse + first, to, dk, dv, stream)) return false;
    if (s.merge) launch(add_rows_kernel, rows * cols, stream, sum, Src(to), rows * cols, cols, z.q_stride);
    const auto clear = [&](Dst y, std::int64_t rest, std::int64_t stride, std::int64_t width) {
        if (rest > 0) launch(clear_rows_kernel, rest * width, stream, y, rest * width, width, stride);
    };
    if (!s.merge) clear(dq + s.q_offset, first, z.q_stride, cols);                     // These queries see no key.
    const std::int64_t rest = (s.seq_k - r->keys) * s.batch, from = r->keys * s.batch; // No query sees these keys.
    clear(dk + from * z.k_stride, rest, z.k_stride, std::int64_t{s.kv_heads} * s.qk_dim);
    clear(dv + from * z.v_stride, rest, z.v_stride, std::int64_t{s.kv_heads} * s.v_dim);
    return true;
}

} // namespace moe::cuda
