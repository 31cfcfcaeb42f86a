// Pieces of a deterministic backward: cuDNN stores the matrix of score gradients for one, whatever the mask leaves of
// it.
//
// So that a window costs what it shows, and that long sequences fit, queries are taken in chunks with the keys that
// they see; where one key head's queries are still too many, its query heads go one part after another.
#include "kernels/cuda/attention/attention_pieces.hpp"
#include "kernels/cuda/clear.hpp"
#include "kernels/cuda/device.cuh"

#include <algorithm>

namespace moe::cuda {
namespace {

constexpr std::int64_t slice_bytes = std::int64_t{9} << 28; // 2.25 GiB of stored score gradients
constexpr std::int64_t most_bytes = std::int64_t{4} << 30;  // bytes where a piece cannot be smaller
constexpr std::int64_t least_chunk = 512;
constexpr int sum_threads = 256;

std::int64_t rounded(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

// The score gradients of one head in whole tiles, read off the plans of cuDNN 9.14 and 9.19.
std::int64_t scores_bytes(std::int64_t queries, std::int64_t keys) {
    return rounded(queries, 64) * rounded(keys, 128) * 2;
}

struct Cut {
    std::int64_t sequences, key_heads, heads, chunk; // heads: query heads of one key head
    bool fits = true;
};

Cut cut_of(const AttentionPlanShape& w) {
    const std::int64_t share = w.heads / w.kv_heads;
    Cut c{w.batch, w.kv_heads, share, w.seq_q};
    if (!w.deterministic) return c;
    const auto head_bytes = [&] {
        return scores_bytes(c.chunk, w.window > 0 ? std::min(w.seq_k, c.chunk + w.window) : w.seq_k);
    };
    const bool from_start = w.window > 0 && !w.causal; // The mask hangs on the last key of the whole.
    if (w.window > 0 && !from_start) {
        const std::int64_t chunk = std::max(least_chunk, rounded(w.window, 128));
        if (4 * chunk <= w.seq_q) c.chunk = chunk;
    }
    while (!from_start && head_bytes() > slice_bytes && c.chunk > least_chunk) c.chunk = rounded(c.chunk / 2, 64);
    c.fits = head_bytes() <= most_bytes;
    const auto at_most = [](std::int64_t wanted, std::int64_t bytes) {
        return std::clamp<std::int64_t>(slice_bytes / bytes, 1, wanted);
    };
    c.heads = ceil_div(share, ceil_div(share, at_most(share, head_bytes()))); // heads of parts of about one size
    c.key_heads = c.heads < share ? 1 : at_most(w.kv_heads, share * head_bytes());
    c.sequences = c.key_heads < w.kv_heads ? 1 : at_most(w.batch, w.heads * head_bytes());
    return c;
}

// The pieces over one range of sequences and key heads.
void add_pieces(const AttentionPlanShape& w, const Cut& c, AttentionPiece p, std::vector<AttentionPiece>& out) {
    const std::int64_t share = w.heads / w.kv_heads, shift = w.seq_k - w.seq_q;
    const std::size_t begin = out.size();
    for (p.query = 0; p.query < w.seq_q; p.query += c.chunk) {
        p.queries = std::min(c.chunk, w.seq_q - p.query);
        // One chunk takes keys that no query sees too: their gradients are zero.
        const bool from_window = c.chunk < w.seq_q && w.window > 0 && w.causal;
        p.key = from_window ? std::max<std::int64_t>(0, p.query + shift - w.window + 1) : 0;
        p.keys = (w.causal ? p.query + p.queries + shift : w.seq_k) - p.key;
        for (std::int64_t h = 0; h < share; h += c.heads) {
            p.head = p.key_head * share + h;
            p.heads = p.key_heads * std::min(c.heads, share - h); // A piece of several key heads has all their heads.
            out.push_back(p);
        }
    }
    for (std::size_t i = begin; i < out.size(); ++i) {
        out[i].shared = out.size() - begin > 1;
        out[i].first = i == begin, out[i].last = i + 1 == out.size();
    }
}

template <class Run>
__device__ void for_each_of(std::int64_t n, Run run) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) run(i);
}

// part[heads, keys, width] to rows `key` on of sums[heads, seq_k, width].
__global__ void add_part_kernel(Src part, float* sums, std::int64_t n, std::int64_t piece, std::int64_t whole,
                                std::int64_t first) {
    for_each_of(n, [&](std::int64_t i) { sums[i / piece * whole + first + i % piece] += load(part, i); });
}

// sums[sequences, heads, keys, width]
__global__ void round_sums_kernel(const float* sums, Dst y, std::int64_t n, std::int64_t heads, std::int64_t keys,
                                  std::int64_t width, std::int64_t interleaved, std::int64_t stride) {
    for_each_of(n, [&](std::int64_t i) {
        const std::int64_t col = i % width, key = i / width % keys, head = i / (width * keys) % heads,
                           sequence = i / (width * keys * heads);
        store(y, (key * interleaved + sequence) * stride + head * width + col, sums[i]);
    });
}

} // namespace

std::vector<AttentionPiece> attention_pieces(const AttentionPlanShape& w) {
    const Cut c = cut_of(w);
    std::vector<AttentionPiece> out;
    if (!c.fits) return out;
    AttentionPiece p;
    for (p.sequence = 0; p.sequence < w.batch; p.sequence += c.sequences) {
        p.sequences = std::min(c.sequences, w.batch - p.sequence);
        for (p.key_head = 0; p.key_head < w.kv_heads; p.key_head += c.key_heads) {
            p.key_heads = std::min(c.key_heads, w.kv_heads - p.key_head);
            add_pieces(w, c, p, out);
        }
    }
    return out;
}

AttentionPlanShape shape_of(const AttentionPlanShape& whole, const AttentionPiece& p) {
    AttentionPlanShape s = whole;
    s.batch = p.sequences, s.heads = p.heads, s.kv_heads = p.key_heads;
    s.seq_q = p.queries, s.seq_k = p.keys;
    s.dense_key_grads = p.shared;
    return s;
}

void sum_key_grads(const AttentionPlanShape& whole, const AttentionPiece& p, const void* part, std::int64_t width,
                   float* sums, Dst y, std::int64_t stride, cudaStream_t stream) {
    const std::int64_t heads = p.sequences * p.key_heads, elements = heads * p.keys * width,
                       all = key_sums(whole, p, width);
    constexpr std::int64_t most_blocks = 4096;
    if (p.first) clear(sums, all * static_cast<std::int64_t>(sizeof(float)), stream);
    add_part_kernel<<<blocks_for(elements, sum_threads, most_blocks), sum_threads, 0, stream>>>(
        {part, Type::bf16}, sums, elements, p.keys * width, whole.seq_k * width, p.key * width);
    CUDA_CHECK(cudaGetLastError());
    if (!p.last) return;
    round_sums_kernel<<<blocks_for(all, sum_threads, most_blocks), sum_threads, 0, stream>>>(
        sums, y, all, p.key_heads, whole.seq_k, width, whole.interleaved, stride);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
