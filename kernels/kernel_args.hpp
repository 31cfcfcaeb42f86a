// Operands and shapes of the kernels: what each computes, in formulas.
#pragma once

#include "kernels/router_args.hpp"
#include "kernels/sparse_args.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>

namespace moe {

enum class Type : std::uint8_t { f32, bf16 };
inline std::size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

struct Src {
    const void* data = nullptr;
    Type type = Type::f32;
};
struct Dst {
    void* data = nullptr;
    Type type = Type::f32;
    operator Src() const { return {data, type}; }
};
// The operand `elements` further on; a null operand stays null.
inline Src operator+(Src s, std::int64_t elements) {
    if (s.data != nullptr)
        s.data = static_cast<const char*>(s.data) + elements * static_cast<std::int64_t>(size_of(s.type));
    return s;
}
inline Dst operator+(Dst d, std::int64_t elements) {
    if (d.data != nullptr) d.data = static_cast<char*>(d.data) + elements * static_cast<std::int64_t>(size_of(d.type));
    return d;
}

// C[m, n] (+)= op(A) op(B); transpose_a: A is stored [k, m]; transpose_b: B is stored [n, k]. `batch` such products,
// whose operands lie so many elements apart; no two of them write the same elements.
struct GemmShape {
    std::int64_t m = 0, n = 0, k = 0;
    bool transpose_a = false, transpose_b = false, accumulate = false;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    std::int64_t a_offset = 0, b_offset = 0, c_offset = 0;
    int batch = 1;
    std::int64_t a_step = 0, b_step = 0, c_step = 0;
};

// forward: C[r, n] = A[r, k] B_e[n, k]^T; dgrad: C[r, k] = A[r, n] B_e[n, k]; wgrad: C_e[n, k] (+)= A_e[r, n]^T B_e[r,
// k]. Rows r of expert e follow those of expert e-1.
enum class GroupedProduct : std::uint8_t { forward, dgrad, wgrad };
struct GroupedShape {
    GroupedProduct product = GroupedProduct::forward;
    int groups = 0;
    std::int64_t n = 0, k = 0, capacity = 0;
    bool accumulate = true; // whether a wgrad adds to C; false sets C, also of experts without rows
    int reserved_sms = 0;   // multiprocessors of a device that something else holds meanwhile
};

// The forward product of E4M3 operands (kernels/fp8.hpp), one byte each, with FP32 scales: those of A per row and block
// of 128 contracted elements, those of B per block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
//   C[r, n] = sum over blocks b of a_scale[r, b] * b_scale[e, n / 128, b] * A[r, k in b] B_e[n, k in b]^T
// A dgrad is the forward of a weight that is stored transposed: tensor cores take 8-bit operands only with the
// contracted index last. A dense product has one group and no counts: all rows are its own. Where a tensor has one
// scale (RoundShape::codes, QuantizedWeights::one_scale), it stands in every place of these.
inline constexpr int scale_block = 128;
inline constexpr std::int64_t scale_blocks(std::int64_t elements) { return (elements + scale_block - 1) / scale_block; }
struct ScaledShape {
    int groups = 0;
    std::int64_t n = 0, k = 0, capacity = 0;
    bool e5m2 = false; // A is E5M2
};

// Rows in E4M3, [rows, cols], and their scales, [rows, ceil(cols / 128)], as quantize_rows leaves them. Where a kernel
// writes its result so, it is what quantize_rows makes of the result in BF16, bit for bit.
struct Fp8Rows {
    std::uint8_t* data = nullptr;
    float* scale = nullptr;
};

// Columns of routed rows in E4M3, as the gradients of weights read them, which contract along the rows: data[blocks,
// cols, 128] and scale[blocks, cols]. A group's rows are cut into blocks of 128 from its first one on, and the blocks
// of a group follow those of the group before. Rows that a group's last block lacks are zeros.
struct Fp8Columns {
    std::uint8_t* data = nullptr;
    float* scale = nullptr;
};
// The most blocks that so many rows in so many groups (0: one) can have.
inline constexpr std::int64_t column_blocks(std::int64_t rows, std::int64_t groups) {
    const std::int64_t begun = groups < 1 ? 1 : groups < rows ? groups : rows;
    return (rows + (scale_block - 1) * begun) / scale_block;
}

// The gradient of weights from columns of E4M3 with FP32 scales along the rows (DeepSeek-V3, arXiv:2412.19437, section
// 3.3.2): over the blocks b of group e,
//   C_e[n, k] (+)= sum of a.scale[b, n] * b.scale[b, k] * A[b, n] B[b, k]^T
// No counts: all rows are one group's.
struct ScaledGradient {
    int groups = 1;
    std::int64_t n = 0, k = 0, capacity = 0; // capacity: rows of the buffer that the counts speak of
    bool accumulate = true;                  // false sets C, also of groups without rows
    int reserved_sms = 0;                    // multiprocessors of a device that something else holds meanwhile
    bool e5m2 = false;                       // A is E5M2
};

struct FilledRows {
    std::int64_t rows = 0, cols = 0;
    int groups = 0;    // length of counts
    bool e5m2 = false; // requantize_columns, permute_columns: rows and columns are E5M2
};

// Formats whose values an operand of a product is rounded to, by the rules of kernels/rounding.hpp. e4m3 and e5m2 have
// one scale for the tensor, mxfp8 one for 32 values of E4M3, nvfp4 one for 16 values of E2M1 and one for the tensor.
enum class RoundFormat : std::uint8_t { e4m3, e5m2, mxfp8, nvfp4 };
struct RoundShape {
    std::int64_t rows = 0, cols = 0;
    int groups = 0; // length of counts; without counts blocks of rows begin each `run` rows
    std::int64_t run = 0;
    RoundFormat format = RoundFormat::mxfp8;
    bool square = false;     // nvfp4: blocks are 16 x 16, and there is one result
    bool transform = false;  // nvfp4: columns are rounded behind a Hadamard transform of 16 rows
    bool stochastic = false; // nvfp4: to one of the two neighbours, by how near they are
    // Of stochastic rounding: row r is of position positions[(first + r) / batch] in sequence noise[2] + (first + r)
    // mod batch of the global batch; noise[0] and noise[1] are the halves of a key, `tensor` names the tensor in it.
    // Column c is column first_col + c of the tensor, group e group first_group + e.
    std::int64_t first = 0, batch = 1, first_col = 0, first_group = 0;
    std::uint64_t tensor = 0;
    // e4m3, e5m2: [1] the largest magnitude that the scale is of, that of steps before; 0: the scale is 1. Null: x's
    // own, for which x is read once more.
    const float* window = nullptr;
    // e4m3, e5m2: the rows in one byte each, with the tensor's scale in every place of theirs. by_row is what they
    // stand for. Columns are a multiple of 16 then.
    Fp8Rows codes{};
};
struct QuantizedWeights {
    int groups = 1;
    std::int64_t n = 0, k = 0;
    // One scale for all of them, as RoundFormat::e4m3 has it, in every place of the squares'. Of window[1], or null: of
    // their own largest magnitude, which is left in largest[1]. With a window [+largest[1]], as round_operand has it.
    bool one_scale = false;
    const float* window = nullptr;
    float* largest = nullptr;
};

// Frequency f of pair i becomes f * (keep + (1 - keep) / factor), keep = clamp((u - low) / (high - low), 0, 1) with
// u = f * turns, or i where turns is 0; cosines and sines are multiplied by `magnitude` (YaRN, arXiv:2309.00071).
struct RopeScale {
    double factor = 1.0, low = 0.0, high = 1.0, turns = 0.0, magnitude = 1.0;
};

// Queries are multiplied by 1 + beta * ln(1 + floor((position + offset) / positions)); beta 0: they are not.
struct QueryScale {
    double beta = 0.0, positions = 1.0, offset = 0.0;
};

// A row of qkv is heads query heads and kv_heads key heads of head_dim each, and kv_heads value heads of v_dim (0:
// head_dim as well). The first rotary_dim
// columns of query and key heads turn by positions[row / batch] * theta^(-2i/rotary_dim): pairs (i, i + rotary_dim/2),
// or (2i, 2i + 1) when interleaved (Su et al., arXiv:2104.09864). With norm, each query and key head is first divided
// by its root mean square (eps inside the root) and scaled by wq or wk, where these are given; with norm_behind it is
// what has turned (magnitude 1) that is.
struct RopeShape {
    std::int64_t tokens = 0, batch = 1;
    int heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0;
    double theta = 10000.0, eps = 1e-6;
    bool interleaved = false, norm = false;
    RopeScale scale{};
    bool norm_behind = false;
    int v_dim = 0;
    QueryScale query_scale{};
};

// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): per head q = [nope, rope], kv = [nope, v]; the rotary
// key of all heads is the last `rope` columns of kv_down's row of kv_lora + rope.
struct MlaRopeShape {
    std::int64_t tokens = 0, batch = 1;
    int heads = 0, nope = 0, rope = 0, v = 0, kv_lora = 0;
    double theta = 10000.0;
    bool interleaved = true;
    RopeScale scale{};
    QueryScale query_scale{}; // of whole heads
};

// softmax(scale * q k^T) v per head. Rows are position * batch + sequence; head h of q starts at column
// q_offset + h * qk_dim of a row, its key and value head is h / (heads / kv_heads). Query i sees keys j <= i + seq_k -
// seq_q when causal, and of those the last `window` if it is not 0. lse[h * batch * seq_q + row] = log of the softmax's
// sum.
//
// Where a sequence is spread over ranks, its rows here are two runs of equal length (seq_q and seq_k are even) that
// begin at `q_start` and `k_start` of the whole; a query at position p then sees keys at p' <= p, and of those the ones
// above p - window. `merge`: more keys of queries whose result over others exists: o and lse are carried on, and dq is
// added to (the online softmax of Milakov & Gimelshein, arXiv:1805.02867).
//
// `document_start[batch * seq_q]`, where it is given: a query sees keys at positions from its own row's on alone, where
// the document begins that it is of. Positions are those of the whole sequence if it is spread, else of the keys. Along
// a sequence they never fall. Causal attention only.
//
// `deterministic`: the gradients have the same bits every time; where it is not set a library may add dq up in any
// order.
//
// `largest[heads]`, where it is given: the largest logit of each head among those that its queries see, with the scale
// and without sinks; one that is there already stays where it is larger.
struct AttentionShape {
    std::int64_t batch = 1, seq_q = 0, seq_k = 0;
    int heads = 0, kv_heads = 0, qk_dim = 0, v_dim = 0;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0; // 0: heads * qk_dim, kv_heads * qk_dim, kv_heads * v_dim
    std::int64_t q_offset = 0, k_offset = 0, v_offset = 0;
    std::int64_t window = 0;
    double scale = 1.0;
    bool causal = true;
    bool spread = false, merge = false, deterministic = false;
    std::int64_t q_start[2] = {0, 0}, k_start[2] = {0, 0}; // positions of a spread sequence's two runs, increasing
    const std::int32_t* document_start = nullptr;
    std::int64_t chunk = 0; // attention_cached alone: a query sees keys of its own run of so many positions, 0: of all
    float* largest = nullptr;
};

// A layer that passes a state along its sequences, over rows position * batch + sequence. A row p of its projection is
// q | k | v | z | gates: key_heads queries and keys of key_dim, value_heads values and gates of the output of
// value_dim. q, k and v pass a causal convolution over `kernel` rows of a sequence and SiLU, and are what a row c
// holds.
//
// delta: a gated delta net (Yang et al., arXiv:2412.06464). Gates are b | a, of every value head the logits of two. Per
// value head, with the key head of its place, unit queries over sqrt(key_dim), unit keys (eps 1e-6 inside the root),
// g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b):
//   S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
// ssd: Mamba-2's state space duality (Dao and Gu, arXiv:2405.21060), where q, k and v are called C, B and x and the key
// heads are groups. Gates are dt, of every head the width of its step: dt <- softplus(dt + dt_bias), cut to [step_min,
// step_max]. With g = -exp(a_log) dt and a factor `skip` of each head:
//   S <- exp(g) S + k (dt v)^T;  o = S^T q + skip v
// Both in chunks of state_chunk positions. Weights are of `parts` times the heads, of which these are the part `part`.
// document_start, where given: state and convolution begin anew where the row's document does.
inline constexpr std::int64_t state_chunk = 64;
enum class StateRule : std::uint8_t { delta, ssd };
struct StateShape {
    std::int64_t rows = 0, batch = 1;
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;
    double eps = 1e-6; // of the norm of o
    int part = 0, parts = 1;
    const std::int32_t* document_start = nullptr; // [rows]
    StateRule rule = StateRule::delta;
    float step_min = 0.0f, step_max = std::numeric_limits<float>::infinity();
    std::int64_t keys() const { return std::int64_t{key_heads} * key_dim; }
    std::int64_t values() const { return std::int64_t{value_heads} * value_dim; }
    std::int64_t convolved() const { return 2 * keys() + values(); } // columns of c, and where z begins in p
    std::int64_t gates() const { return convolved() + values(); }    // where the gates begin in p
    std::int64_t gate_columns() const { return (rule == StateRule::ssd ? 1 : 2) * value_heads; }
    std::int64_t projected() const { return gates() + gate_columns(); }
    std::int64_t seq() const { return rows / batch; }
    std::int64_t chunks() const { return (seq() + state_chunk - 1) / state_chunk; }
    // Columns that the gated norm takes together: a head's, or those of a group's heads.
    std::int64_t norm_columns() const { return rule == StateRule::ssd ? values() / key_heads : value_dim; }
    // Floats of the memory that a call may use. delta: of every chunk and value head two systems of the chunk's rows
    // and keys and values for each; the gradients' has both states, too. ssd: the state before each chunk and its
    // decay; the gradients' has the gradient of the state behind it, sums, and a group's queries and keys.
    std::int64_t work(bool grad) const {
        const std::int64_t k = key_dim, v = value_dim, heads = batch * chunks() * value_heads;
        if (rule == StateRule::ssd)
            return heads * ((grad ? 2 : 1) * k * v + 4) + (grad ? batch * chunks() * 2 * state_chunk * keys() : 0);
        const std::int64_t each = 2 * state_chunk + (grad ? 3 * k + 2 * v : k + v);
        return heads * (state_chunk * each + (grad ? 2 * k * v : 0));
    }
};

// Columns [from, from + cols) of rows that are x_stride long go to (are added to: accumulate) columns [to, to + cols)
// of rows that are y_stride long; the others keep what they hold.
struct ColumnsShape {
    std::int64_t rows = 0, cols = 0;
    std::int64_t x_stride = 0, from = 0, y_stride = 0, to = 0;
    bool accumulate = false;
};

// The norms of queries and of keys over all heads at once: a row of `width` holds `queries` and then `keys` columns, of
// all_queries and all_keys on all ranks together. squares[tokens, 2] are those of the latter: where several ranks hold
// the same key head, each counts key_share of its sums.
struct HeadsNormShape {
    std::int64_t tokens = 0, queries = 0, keys = 0, width = 0;
    std::int64_t all_queries = 0, all_keys = 0;
    double eps = 1e-6;
    float key_share = 1.0f;
};

// A row of x holds `front` columns and `heads` value heads of `dim` behind them; from_keys: it ends with the front,
// whose last heads are the values as well. Each value head is divided by its root mean square, eps inside the root.
struct ValueNormShape {
    std::int64_t tokens = 0, front = 0;
    int heads = 0, dim = 0;
    double eps = 1e-6;
    bool from_keys = false;
    std::int64_t values() const { return std::int64_t{heads} * dim; }
    std::int64_t width() const { return front + values(); }                      // of y
    std::int64_t x_width() const { return from_keys ? front : width(); }         // of x
    std::int64_t source() const { return from_keys ? front - values() : front; } // of the values in x
};

// silu x*sigmoid(x); gelu exact (erf); quick_gelu x*sigmoid(1.702x); relu2 max(x, 0)^2; gelu_tanh
// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
enum class Curve : std::uint8_t { silu, gelu, quick_gelu, relu2, gelu_tanh };
struct ActivationShape {
    std::int64_t rows = 0, ffn = 0;
    Curve curve = Curve::silu;
    bool gated = true; // whether x is [rows, 2 ffn], gate first; else [rows, ffn]
    int groups = 0;    // length of counts, when given
    // Gated only; 0 is none. GPT-OSS: y = curve(min(gate, limit)) * (1 + clamp(up, -limit, limit)). limit_behind
    // (Step-3.5): y = min(curve(gate), limit) * clamp(up, -limit, limit).
    double limit = 0.0;
    bool limit_behind = false;
};

// Of every sequence an expert keeps `capacity` of its copies among `rivals` rows: the heaviest (equal ones by lower
// position) or the first. Row r belongs to sequence r modulo `sequences`. Written are rows [first, first + tokens).
// Weights are compared with `drop_bits` of their fraction, so that tokens that differ by rounding alone, such as the
// same word at the start of two documents, go by position in every order of sums.
inline constexpr int drop_bits = 11;
struct DropShape {
    std::int64_t tokens = 0, rivals = 0, first = 0, sequences = 1, capacity = 0;
    int experts = 0, top_k = 0;
    bool by_weight = true;
};

// Copies (t, k) of tokens and their place row_of[t * top_k + k] in expert-major order. per_copy: the token side holds
// one row of `cols` per copy, [tokens * top_k, cols], instead of one per token.
struct PermuteShape {
    std::int64_t tokens = 0, cols = 0;
    int top_k = 0;
    bool per_copy = false;
    std::int64_t padded_rows = 0; // rows of `rows`, where permute zeroes those that no copy takes; 0 = no padding
};

// all_counts[etp * ep, experts]: row p * etp + m counts the rows that source (expert rank p, ETP member m) sends to
// each expert. Rows arrive member by member, within a member source by source, within a source expert by expert; of the
// experts, [first, first + local) live here. Expert-major order keeps the arrival order within an expert.
struct RowsShape {
    std::int64_t cols = 0, capacity = 0;
    int experts = 0, ep = 1, etp = 1;
    int first = 0, local = 0;
};

// Tokens on their way between `domains` that have `experts` of all each, in slots of slot_rows rows, one for each
// domain.
struct DomainShape {
    std::int64_t tokens = 0, slot_rows = 0;              // tokens of a rank
    int top_k = 0, experts = 0, domains = 1, domain = 0; // domain: this rank's
};

// Routed rows on their way through slots of a fixed size, as exchanges between devices need them, whose sizes the host
// must know: slots[parts, slot_rows, cols]. Part p of the buffer is, by all_counts of RowsShape, for expert rank
// `rank`, member `member`: `sent`, what it sends to expert rank p; `arriving`, what expert rank p sends to it (over the
// same member); `gathered`, what arrives at member p of its expert rank.
enum class RowParts { sent, arriving, gathered };
struct SlotShape {
    RowParts parts = RowParts::sent;
    std::int64_t cols = 0, slot_rows = 0;
    std::int64_t capacity = 0; // rows of the buffer
    int experts = 0, ep = 1, etp = 1, rank = 0, member = 0;
    int count() const { return parts == RowParts::gathered ? etp : ep; }
};

// `pieces` of columns side by side, each cut into `parts`: part p of all rows holds its share of every piece.
struct PartsShape {
    std::int64_t rows = 0;
    std::int64_t pieces[6] = {}; // columns, multiples of parts; unused ones are 0
    int parts = 1;
    std::int64_t cols() const { return pieces[0] + pieces[1] + pieces[2] + pieces[3] + pieces[4] + pieces[5]; }
};

// counts[etp * ep, experts] are all_counts of RowsShape; the buffer of every expert rank and ETP member has `capacity`
// rows for what its sources send to its experts.
struct FitShape {
    std::int64_t copies = 0, capacity = 0; // copies: length of row_of
    int experts = 0, ep = 1, etp = 1;
};

// Columns of this rank's slice are vocabulary entries first + j; entries >= vocab are padding and take no part.
struct LossShape {
    std::int64_t rows = 0, vocab_local = 0, vocab = 0, first = 0;
    double scale = 1.0;
    const float* share = nullptr; // [share[1]] multiplies every scale
};

// hyper[9]: lr, beta1, beta2, eps, weight decay, clip, 1 - beta1^t, 1 - beta2^t, and the largest square of the
// gradients' norm with which a step is taken (0: any). A square beyond it, or one that is no number, makes the step a
// bad one.
struct AdamShape {
    std::int64_t elements = 0; // elements of this shard
    std::int64_t offset = 0;   // elements of the bucket before this shard
    std::int64_t decayed = 0;  // elements of the bucket, from its start, that take weight decay
    float rate = 1.0f;         // multiplies the learning rate
    float decay = -1.0f;       // in place of the weight decay, of all elements; below 0: hyper's
};

} // namespace moe
