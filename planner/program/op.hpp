// Ops and their tensors: what one rank computes and communicates, with sizes, attributes, bytes and FLOPs.
#pragma once

#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace moe {

enum class Dtype : std::uint8_t { f32, bf16, fp8_tensor, fp8_block, mxfp8, nvfp4, i32 };
// Bytes that `elements` of a dtype occupy, block scales included (fp8_block 1x128 FP32, mxfp8 1x32 E8M0, nvfp4 1x16
// E4M3).
std::int64_t bytes_of(Dtype dtype, std::int64_t elements);
inline constexpr std::int64_t fp8_block_size = 128;
// Whether values have scales of their own, by tensor or by block.
constexpr bool is_quantized(Dtype dtype) { return dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::i32; }
const char* to_string(Dtype dtype);

using TensorId = std::int32_t;
inline constexpr TensorId no_tensor = -1;

// Where a tensor's storage comes from.
enum class Storage : std::uint8_t {
    parameter,  // flat bucket of weights in storage precision, whole step
    gradient,   // flat bucket in the plan's dtype of gradients, whole step
    optimizer,  // this rank's shard of master weights and moments, whole run (offloaded: an activation of finish)
    activation, // produced in a slot; lifetime derived by plan_memory()
    input,      // written by the trainer before the step, one instance per micro-batch (ids, labels) or one (positions)
    scalar,     // small, one instance, zeroed by the trainer at step start (loss, norms, flags, hyper-parameters)
    host,       // in host memory: offloaded activations, one instance per micro-batch in flight, and optimizer states
};

struct Tensor {
    std::string name;
    Dtype dtype = Dtype::f32;
    Storage storage = Storage::activation;
    std::int64_t rows = 0, cols = 1; // allocated shape, row-major
    double expected_rows = 0.0;      // rows that hold data on average (routed tensors); = rows otherwise
    int chunk = -1;                  // activations and inputs: the model chunk they belong to
    bool per_micro_batch = true;     // inputs: one instance per micro-batch or one for all
    TensorId base = no_tensor;       // a view: elements [offset, offset + rows*cols) of `base`, in this tensor's dtype
    // Backward: the tensor whose contents this one holds again, recomputed, gathered or brought back; see
    // repeat_tensor().
    TensorId again_of = no_tensor;
    std::int64_t offset = 0;
    Group shard_group{}; // axes set: the view is this rank's own slice, offset += index in group * elements()

    std::int64_t elements() const { return rows * cols; }
    // Matrices of fp8_block: the elements, and behind them (16 bytes aligned) the scales [rows, ceil(cols / 128)].
    std::int64_t scale_offset() const { return (elements() + 15) / 16 * 16; } // bytes
    std::int64_t bytes() const;
    double expected_bytes() const; // with expected_rows
};

enum class OpKind : std::uint8_t {
    // Each line: inputs -> outputs. S = gathered tokens, T = local tokens, K = top-k, E experts, El local experts,
    // cap = planned rows of a routed buffer. [x] optional, +x accumulated into.
    embedding,      // ids[S], table[V/tp, h] -> x[S, h]; rows of ids outside this rank's vocabulary slice are zero
    embedding_grad, // ids[S], dx[S, h] -> +dtable[V/tp, h]
    rmsnorm,        // x[R, C (stride)], w[C] -> y[R, C], rstd[R]
    rmsnorm_grad,   // dy[R, C], x, w, rstd, [dresidual[R, C]] -> dx[R, C (stride)] = grad (+ dresidual), +dw[C]
    add,            // a, b -> a + b
    bias_add,       // x[R, C], b[C] -> x + b
    copy_columns,   // x[R, W] -> y[R, W']: a range of columns copied or added; ColumnsAttr
    bias_grad,      // dy[R, C] -> +db[C]
    gemm,           // A, B -> C or +C; GemmAttr
    rope,      // qkv[S, W], positions[S/b], [wq[d], wk[d]] -> qkv'[S, W], [rstd[S, heads+kv]]: QK-norm and rotation, v
               // copied
    rope_grad, // dqkv'[S, W], positions, [qkv, wq, wk, rstd] -> dqkv[S, W], [+dwq, +dwk]
    mla_rope, // q[S, n(dn+dr)], kv[S, n(dn+dv)], kv_down[S, c+dr], positions -> q'[S, n(dn+dr)], k[S, n(dn+dr)], v[S, n
              // dv]
    mla_rope_grad, // dq', dk, dv, positions -> dq, dkv, dkv_down[:, c:c+dr] (summed over heads)
    attention, // q, k, v, [sinks], [o, lse of a ring's steps before] -> o[S, heads*dv], lse[heads*S]; AttentionAttr (q,
               // k, v may be one packed tensor)
    attention_grad, // do, q, k, v, o, lse, [sinks], [dq of a ring's steps before] -> dq, dk, dv, [+dsinks] (packed like
                    // q, k, v)
    // Sparse attention (cost only): its ops `attention` and `attention_grad` read keys behind q, k, v and behind lse.
    pick_keys, // index q[S, n d], index k[Sk, d], w[S, n] -> keys[S, top k] i32: those of the largest sum over heads
               // of w * relu(q k); AttentionAttr
    pick_keys_grad,     // q, k, lse, index q, index k, w, keys -> dindex q, dindex k, dw: of the divergence between the
                        // indexer's and the attention's distribution over the keys that were picked
    scan,               // zxbcdt[S, W] -> y[S, n p], y normed and gated[S, n p]: Mamba-2; ScanAttr (cost only)
    scan_grad,          // dout[S, n p], zxbcdt, y -> dzxbcdt[S, W]
    activation,         // x[R, 2f or f], [probs[R]], [counts] -> [y[R, f] = act(gate)*up (* prob)], [y quantized]
    activation_grad,    // dy[R, f], x, [probs], [counts] -> dx[R, 2f or f], [dprobs[R]], [y], [dx quantized]
    sigmoid_scale,      // y[R, C], g[R] -> y * sigmoid(g)                          (Qwen2-MoE shared expert gate)
    sigmoid_scale_grad, // dout[R, C], y, g -> dy, dg
    scale_rows,         // rows[R, C], p[R], [counts] -> rows * p
    scale_rows_grad,    // dout[R, C], rows, p, [counts] -> drows, dp
    router,             // logits[T, E], [bias[E]], [positions] -> index[T, K] i32, weight[T, K] f32; positions: forced
    router_grad,        // dweight[T, K], logits, index -> dlogits[T, E]
    router_load,        // logits[T, E] -> load[B, E] f32: tokens of each sequence (B = 1: of all) by their best scores
    router_loss,        // logits, [load] -> +loss[2]: auxiliary loss and z-loss of these tokens; BalanceAttr
    router_loss_grad,   // logits, [load], dlogits -> dlogits + gradient of both losses
    add_counts,         // counts[E] i32 -> +sum[E] f32
    drop_copies,        // index[T, K], weight -> index with -1 where dropped, weight with 0 there; DropAttr
    local_experts,      // index[T, K] -> index counted from this rank's first expert, -1 for those of others; RowsAttr
    expert_bias,        // load[E], [overflow[1]] -> +master, w[n]: this rank's shard of the bucket that holds the bias,
                        // unless rows overflowed; ExpertBiasAttr
    permute_map,   // index[T, K] -> counts[E] i32, row_of[T*K] i32: position of copy (t, k) in expert-major order, -1
                   // where index is negative
    permute,       // x[T, C], row_of -> rows[T*K, C], quantized ones with their scales; also weight[T, K] as C = 1 with
                   // one value per copy (PermuteAttr)
    unpermute,     // rows[T*K, C], row_of -> y[T, C] summed over K in FP32 (or gathered to [T, K] for per-copy values)
    expert_counts, // all_counts[G, E] -> counts[El] i32: rows of each local expert over all sources
    fit_rows,      // counts[G, E], row_of[n] -> counts, row_of, +overflow[1]: where a buffer of RowsAttr::capacity rows
                   // would
    // overflow, nothing is routed at all (counts 0, row_of -1) and the rows too many are added to overflow
    sort_rows,         // rows[cap, C] source-major, all_counts -> rows[cap, C] expert-major; RowsAttr
    unsort_rows,       // the inverse
    grouped_gemm,      // GroupedGemmAttr: rows, W[El, n, k], counts -> rows; or wgrad: dy, x, counts -> (+)dW
    grouped_bias_add,  // rows[cap, C], b[El, C], counts, [probs[cap]] -> rows + b (* prob); GroupedBiasAttr
    grouped_bias_grad, // drows[cap, C], counts, b, [probs] -> +db, [dprobs]; GroupedBiasAttr
    quantize, // x, [counts] -> xq (row-wise), [xq transposed]; x in BF16. Weights as our kernels read them: w (BF16 or
              // FP32, rounded to BF16) -> both forms in one tensor; QuantizeAttr
    dequantize,    // xq (row-wise), [counts] -> x in BF16
    cast,          // x -> y in another dtype, element by element
    ce_max,        // logits[S, V/tp] -> max[S]
    ce_sum,        // logits, max, labels[S] -> stat[S, 2]: sum of exp, logit of the label (0 if not in this slice)
    ce_loss,       // max, stat -> +loss[1]: scale * sum over rows with a label of -log softmax
    ce_grad,       // logits, max, stat, labels -> dlogits[S, V/tp], times scale
    cross_entropy, // logits[S, V], labels -> dlogits over logits, max, stat, +loss[1]: all four, without slices
    zero,          // -> x = 0
    sum_squares,   // x -> +s[1]
    adamw,         // g[n], s[1], hyper[8], master, m, v, [overflow[1]] -> master, m, v, w[n] in storage precision, or
                   // none of them where rows overflowed; no w where the next step quantizes master; AdamAttr
    // communication; group of size 1 is never emitted
    all_gather,          // x[R, C] -> y[G*R, C] in group order
    reduce_scatter,      // x[G*R, C] -> y[R, C], summed in group order
    all_reduce,          // x -> y (may be the same tensor), sum or max; ReduceAttr
    all_to_all_rows,     // rows, all_counts -> rows: dispatch or combine over EP; RowsAttr
    all_gather_rows,     // rows[cap, C], all_counts -> rows[etp*cap, C] over ETP, members' valid rows one after another
    reduce_scatter_rows, // the inverse with a sum over ETP
    all_to_all,          // x[R, C] -> y: heads of the whole sequence <-> all heads of this rank's tokens; AllToAllAttr
    ring_exchange,       // x -> y: send to the next, receive from the previous member of the group (CP ring)
    // Dispatch and permute in one, over memory that the members reach: x[T, C], all_counts, row_of, [weight[T, K]],
    // [places] -> rows[cap, C] expert-major, [probs[cap], places[G*T, K]: where the members' copies lie here]; RowsAttr
    dispatch_tokens,
    // The way back: rows[cap, C], all_counts, row_of, places, [values[cap]] -> y[T, C] summed in FP32, parts (sums on
    // their way: min(K, G) rows of C per token), [by_copy[T, K]]; RowsAttr. A back end that moves rows another way
    // leaves places and parts as they are.
    combine_tokens,
    send,           // x -> peer; PeerAttr
    recv,           // peer -> x; PeerAttr
    stash_rows,     // rows[cap, C], counts -> pages[R, C]: the rows that hold data, into paged memory
    unstash_rows,   // pages, counts -> rows[cap, C]
    copy_to_host,   // x.. -> host buffers, one each (offload)
    copy_from_host, // [what is waited for], host buffers.. -> x.., one each
};
const char* to_string(OpKind kind);
bool is_communication(OpKind kind);

// Streams keep their own order; ops on different streams wait for each other only through the tensors they share.
enum class Stream : std::uint8_t { compute, tensor, expert, data, pipeline_in, pipeline_out, host };
inline constexpr int stream_count = 7;
const char* to_string(Stream stream);

// The part of the model an op belongs to: recompute, offload and graph scopes are sets of these.
enum class Module : std::uint8_t {
    embedding,
    layernorm,
    attn_in,
    mla_up_proj,
    core_attn,
    attn_out,
    mlp,
    moe_act_dense,
    router,
    dispatch,
    experts,
    moe_act,
    combine,
    shared_experts,
    residual,
    head,
    mtp,
    pipeline,
    data_parallel,
    optimizer,
};
const char* to_string(Module module);

enum class Phase : std::uint8_t { forward, dgrad, wgrad, recompute, step };
const char* to_string(Phase phase);

// C[m, n] (+)= op(A) op(B), row-major. transpose_a: A is stored [k, m]; transpose_b: B is stored [n, k].
// ld*: row stride in elements, 0 = dense.
struct GemmAttr {
    std::int64_t m = 0, n = 0, k = 0;
    bool transpose_a = false, transpose_b = false, accumulate = false;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    std::int64_t a_offset = 0, b_offset = 0, c_offset = 0; // elements from the tensor's start
    // tp_overlap, where a ring brings the sequence: the rows of C, m of ring * m, are those of the TP member `step`
    // places before this rank. A wgrad has all steps' A as operands 0, 2, 3, .., each k / pieces rows of C = A^T B.
    int ring = 1, step = 0;
    // tp_overlap, where a reduction takes the sequence in pieces: rows of A in as many runs, one of every TP member's,
    // so many elements apart.
    std::int64_t runs = 1, run_stride = 0;
    int batch = 1; // as many products side by side, one for every head, on columns of A and C and rows of B (cost only)
};
enum class GroupedMode : std::uint8_t { forward, dgrad, wgrad };
// forward: y[r, n] = x[r, k] W_e[n, k]^T; dgrad: dx[r, k] = dy[r, n] W_e[n, k]; wgrad: dW_e[n, k] (+)= dy_e^T x_e.
// Rows of expert e follow those of e-1; counts[El] on the device.
struct GroupedGemmAttr {
    GroupedMode mode = GroupedMode::forward;
    int groups = 0;
    std::int64_t n = 0, k = 0, capacity = 0;
    bool accumulate = true; // wgrad; without it dW is set, to zero for experts without rows
    int spared = 0;         // multiprocessors of a device that it leaves to what runs beside it in its own slot
};
// Where the rows are partial sums over ETP, every member adds the same share of the bias.
struct GroupedBiasAttr {
    double share = 1.0;
};
// Weights of fp8_block in 128 x 128 blocks: `groups` matrices [n, k] and, behind them, as many [k, n]; then the scales
// [groups, ceil(n / 128), ceil(k / 128)] and those of the transposed ones. Products take E4M3 with the contracted index
// last, so that dgrad reads the second form.
struct QuantizeAttr {
    int groups = 1;
    std::int64_t n = 0, k = 0;
    std::int64_t scales() const; // of one form
};
struct NormAttr {
    std::int64_t rows = 0, cols = 0, stride = 0; // stride of x and dx in elements
    double eps = 1e-6;
    Module within = Module::layernorm; // else the module whose first product keeps its output, see Norm::within
};
// Frequency f of pair i becomes f * (keep + (1 - keep) / factor), keep = clamp((u - low) / (high - low), 0, 1) with
// u = f * turns, or i where turns is 0; queries and keys are multiplied by `magnitude` as they turn.
struct FrequencyScale {
    double factor = 1.0, low = 0.0, high = 1.0, turns = 0.0, magnitude = 1.0;
};
// The scaling of a model for heads of `rotary_dim` rotated columns. Source: transformers 5.23, modeling_rope_utils.py;
// YaRN: arXiv:2309.00071.
FrequencyScale frequency_scale(const Model& model, int rotary_dim);
struct RopeAttr {
    std::int64_t tokens = 0, batch = 1; // row = position_index * batch + sequence
    int heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0;
    double theta = 10000.0, eps = 1e-6;
    bool interleaved = false, norm = false;
    FrequencyScale scale;
};
struct MlaRopeAttr {
    std::int64_t tokens = 0, batch = 1;
    int heads = 0, nope = 0, rope = 0, v = 0, kv_lora = 0;
    double theta = 10000.0;
    bool interleaved = true;
    FrequencyScale scale;
};
struct AttentionAttr {
    std::int64_t batch = 1, seq_q = 0, seq_k = 0; // rows are position * batch + sequence
    int heads = 0, kv_heads = 0, qk_dim = 0, v_dim = 0;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0; // row strides, elements
    std::int64_t q_offset = 0, k_offset = 0, v_offset = 0; // within a row
    std::int64_t window = 0;
    double scale = 1.0;
    bool causal = true;
    bool gathered = false;   // keys are compressed and picked by index (cost only)
    std::int64_t picked = 0; // keys that an indexer picks for each query, 0 = none (cost only)
    bool kept = false;       // pick_keys: layers behind this one read the choice as well, so that it is not made again
    std::int64_t chunk = 0;  // see Attention (cost only)
    double visible = 0.5;    // share of the seq_q x seq_k square that the mask leaves (cost only)
    // Step `step` of a CP ring: keys and values are those of the member `step` places before this rank. Each member
    // holds two runs of the sequence, r and 2 ring - 1 - r of 2 ring (zigzag): every step sees half of its square.
    int ring = 1, step = 0;
    bool merge = false; // the steps before are carried on: o and lse, or dq
    bool deterministic = false;
};
// Mamba-2's convolution, scan and gated norm, over chunks of the sequence (arXiv 2405.21060 section 7).
struct ScanAttr {
    std::int64_t rows = 0;
    int heads = 0, head_dim = 0, groups = 0, state = 0, chunk = 0;

    double forward_bytes() const;
    double backward_bytes() const;
};
// Columns [from, from + cols) of x are copied to, or added to, columns [to, to + cols) of y.
struct ColumnsAttr {
    std::int64_t cols = 0, from = 0, to = 0;
    bool accumulate = false;
};
struct ActivationAttr {
    std::int64_t rows = 0, ffn = 0;
    Activation function = Activation::silu;
    bool gated = true;
    double limit = 0.0; // LayerKind::swiglu_limit
};
struct RouterAttr {
    std::int64_t tokens = 0;
    int experts = 0, top_k = 0;
    Router router;
    std::int64_t batch = 1; // forced: row r of this rank's tokens is of position positions[(first + r) / batch]
};
// What a layer's tokens add to the losses of its router; see RouterTraining.
struct BalanceAttr {
    std::int64_t tokens = 0, sequences = 1; // row r belongs to sequence r modulo sequences
    int experts = 0, top_k = 0;
    Router router;
    double aux = 0.0; // factor of sum over e of n(e) * (sum of P(t, e)); 0 = only the z-loss
    double z = 0.0;   // factor of the sum of logsumexp^2
};
struct DropAttr {
    std::int64_t tokens = 0, capacity = 0; // capacity: tokens that one expert keeps
    int experts = 0, top_k = 0;
    DropPolicy policy = DropPolicy::probs;
};
struct ExpertBiasAttr {
    int experts = 0;
    std::int64_t offset = 0; // of the bias in its bucket, elements
    double rate = 0.0;
};
struct PermuteAttr {
    std::int64_t tokens = 0, cols = 0; // cols 1 with per_copy: x is [T, K]
    int top_k = 0, experts = 0;
    bool per_copy = false;
    bool local = false; // experts are those of this rank, tokens those of all that share them
    // Rows of each expert, filled up with zeros; 0: as many as copies chose it. permute_map then says so in a third
    // output, besides the counts of real copies.
    std::int64_t padded = 0;
};
// Row movement over EP (and ETP). combine = false: tokens to experts; true: back. Counts come from all_counts[G, E]
// with G = ep ranks (ETP > 1: etp*ep, ETP fastest).
struct RowsAttr {
    std::int64_t cols = 0, capacity = 0; // capacity: rows of the expert-side buffer
    int experts = 0, ep = 1, etp = 1;
    bool combine = false;
    bool beside = false; // of tokens over peer memory: the slot itself computes something else meanwhile
};
struct LossAttr {
    std::int64_t rows = 0, vocab_local = 0, vocab = 0; // columns >= vocab are padding and take no part
    double scale = 1.0;                                // 1 / tokens of the global batch
    double gradient_scale = 1.0;                       // cross_entropy: of dlogits, where scale is the loss's
};
struct AdamAttr {
    std::int64_t elements = 0; // of this rank's shard
    std::int64_t decayed = 0;  // elements of the whole bucket, from its start, that weight decay applies to
};
struct ReduceAttr {
    bool max = false;
    // reduce_scatter in pieces: where in the output this piece lies, elements; 0 elements: it is the whole.
    std::int64_t offset = 0, elements = 0;
};
struct PeerAttr {
    int delta = 0; // pipeline rank of the peer minus mine, modulo pp; 0 (where a V turns) = to myself
    int tag = 0;   // 0 activations, 1 their gradients, 2 + 2d and 3 + 2d the same of MTP layer d computed before the
                   // loss's stage, first_table_tag() and up gradients of the embedding table at the end of the step
    int stage = 0; // of tables: pipeline rank that receives; else virtual stage whose input (even tags) or output
                   // gradient (odd tags) travels: both ends name the same one
};
inline int first_table_tag(const Model& model) { return 2 + 2 * static_cast<int>(model.mtp.size()); }
// The side of tokens has the rows of one CP member, runs r and 2 parts - 1 - r of 2 parts, and `pieces` of columns side
// by side (queries, keys, values); the side of heads has the whole sequence in order and 1/parts of every piece.
struct AllToAllAttr {
    bool to_heads = true; // x: tokens -> heads, or back
    int parts = 1;
    std::int64_t rows = 0, cols = 0;      // of x
    std::array<std::int64_t, 3> pieces{}; // columns, on the side of tokens; unused ones are 0
};
struct CopyAttr {
    std::int64_t elements = 0;
};
using Attr = std::variant<std::monostate, GemmAttr, GroupedGemmAttr, NormAttr, RopeAttr, MlaRopeAttr, AttentionAttr,
                          ColumnsAttr, ActivationAttr, RouterAttr, PermuteAttr, RowsAttr, LossAttr, AdamAttr,
                          ReduceAttr, PeerAttr, AllToAllAttr, CopyAttr, BalanceAttr, DropAttr, ExpertBiasAttr,
                          GroupedBiasAttr, QuantizeAttr, ScanAttr>;

struct Op {
    OpKind kind{};
    Stream stream = Stream::compute;
    Module module = Module::residual;
    Phase phase = Phase::forward;
    std::int16_t layer = -1;       // global decoder layer, -1 = none
    Group group{};                 // communication ops
    std::vector<TensorId> in, out; // optional operands that are absent are no_tensor
    Attr attr;
    double flops = 0.0; // executed, not model, FLOPs at expected rows
    // Device memory read and written at expected rows. Communication: bytes of one rank's larger side (all_gather:
    // output, reduce_scatter: input, all_reduce: the tensor, all_to_all_rows and *_tokens: the T*K rows, own share
    // included).
    double bytes = 0.0;
};

} // namespace moe
