// The attributes of ops, one structure for each family of kinds.
#pragma once

#include "planner/machine/precision.hpp"
#include "planner/model/fwd.hpp"
#include "planner/model/layer_kind.hpp"
#include "planner/plan/choices.hpp"
#include "planner/program/op_kind.hpp"

#include <array>
#include <cstdint>
#include <variant>

namespace moe::program {

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
    int batch = 1; // products side by side, one for every head, whose operands lie so many elements apart
    std::int64_t a_step = 0, b_step = 0, c_step = 0;
    bool e5m2 = false; // A, where it is quantized, is E5M2
};
enum class GroupedMode : std::uint8_t { forward, dgrad, wgrad };
// forward: y[r, n] = x[r, k] W_e[n, k]^T; dgrad: dx[r, k] = dy[r, n] W_e[n, k]; wgrad: dW_e[n, k] (+)= dy_e^T x_e.
// Rows of expert e follow those of e-1; counts[El] on the device.
struct GroupedGemmAttr {
    GroupedMode mode = GroupedMode::forward;
    int groups = 0;
    std::int64_t n = 0, k = 0, capacity = 0;
    bool accumulate = true; // a wgrad adds to dW where true; false sets dW, to zero for experts without rows
    int reserved_sms = 0;   // multiprocessors of a device that it leaves to what runs beside it in its own slot
    bool e5m2 = false;      // the rows, where they are quantized, are E5M2
};
// Every member adds the same share of the bias where the rows are partial sums over ETP.
struct GroupedBiasAttr {
    double share = 1.0;
};
// Weights of fp8_block in 128 x 128 blocks: `groups` matrices [n, k] and, behind them, as many [k, n]; then the scales
// [groups, ceil(n / 128), ceil(k / 128)] and those of the transposed ones. Products take E4M3 with the contracted index
// last, so that dgrad reads the second form.
struct QuantizeAttr {
    int groups = 1;
    std::int64_t n = 0, k = 0;
    bool one_scale = false;      // fp8-tensor: that of all of them, in every place of the squares'
    int slot = -1;               // delayed scaling, as RoundAttr has it
    std::int64_t scales() const; // scales of one form
};
// Rows that are quantized to fp8_columns: those of each group, where there are counts, or of each of so many equal
// pieces begin a block of their own.
struct ColumnBlocksAttr {
    int pieces = 1;
    bool e5m2 = false; // the rows, which are quantized, and the columns
};
// An operand of products in fp8-tensor, or in a precision that the plan emulates (Plan::computed_in()): BF16 in, BF16
// out, or fp8_block with the tensor's scale in every place. Blocks of rows begin with each group, where there are
// counts, or each `run` rows.
struct RoundAttr {
    enum class Role : std::uint8_t { activation, weight, gradient };
    machine::Precision format = machine::Precision::mxfp8;
    Role role = Role::activation;
    std::int64_t run = 0;
    // Of a gradient that is rounded stochastically: a name among the tensors of a step, rows of a position, and whether
    // columns are this TP rank's. ring > 1: so are rows, or they are those of the member `step` places before it.
    std::uint64_t tensor = 0;
    std::int64_t batch = 1;
    bool own_columns = false;
    int ring = 1, step = 0;
    int slot = -1; // delayed scaling: place in ProgramIo::scale_windows and scale_largest
};
struct NormAttr {
    std::int64_t rows = 0, cols = 0, stride = 0; // stride of x and dx in elements
    double eps = 1e-6;
    Module within = Module::layernorm; // else the module whose first product keeps its output, see Norm::within
    bool centred = false;              // LayerNorm: the mean is taken off first
};
// The norms of all query heads and of all key heads of a packed row, over heads of all TP ranks.
struct HeadsNormAttr {
    std::int64_t tokens = 0, queries = 0, keys = 0; // columns of this rank's query and key heads
    std::int64_t all_queries = 0, all_keys = 0;     // columns of those of all TP ranks
    double eps = 1e-6;
    double key_share = 1.0; // of a key head's sums that each of the TP ranks with this head counts
};
struct ScaleAttr {
    double factor = 1.0;
};
struct ClipAttr {
    double limit = 0.0;
    bool soft = false; // limit * tanh(x / limit)
};
// x's row ends with `heads` value heads of `dim`, or, where keys serve as values, with as many key heads; the
// normed ones follow its other columns in y's.
struct ValueNormAttr {
    std::int64_t tokens = 0, front = 0; // front: columns of queries and keys
    int heads = 0, dim = 0;
    double eps = 1e-6;
    bool from_keys = false;
};
struct GateAttr {
    bool softplus = false; // instead of a sigmoid
};
// Frequency f of pair i becomes f * (keep + (1 - keep) / factor), keep = clamp((u - low) / (high - low), 0, 1) with
// u = f * turns, or i where turns is 0; queries and keys are multiplied by `magnitude` as they turn.
struct FrequencyScale {
    double factor = 1.0, low = 0.0, high = 1.0, turns = 0.0, magnitude = 1.0;
};
// The scaling of a rotation of `rotary_dim` columns of a head. Source: transformers 5.23, modeling_rope_utils.py;
// YaRN: arXiv:2309.00071.
FrequencyScale frequency_scale(const model::Rope& rope, int rotary_dim);
struct RopeAttr {
    // Row = index of its position * batch + sequence; positions by row (documents) have batch 1.
    std::int64_t tokens = 0, batch = 1;
    int heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0;
    double theta = 10000.0, eps = 1e-6;
    bool interleaved = false, norm = false;
    FrequencyScale scale;
    bool norm_behind = false; // the norm follows the rotation
    int v_dim = 0;            // columns of a value head
    model::QueryScale query_scale;
};
struct MlaRopeAttr {
    std::int64_t tokens = 0, batch = 1;
    int heads = 0, nope = 0, rope = 0, v = 0, kv_lora = 0;
    double theta = 10000.0;
    bool interleaved = true;
    FrequencyScale scale;
    model::QueryScale query_scale;
};
// The loss of an indexer, see IndexerTraining: of `heads` heads of `dim`, whose scores have the factor `scale`.
struct IndexLoss {
    int heads = 0, dim = 0;
    double scale = 1.0;
    int all_heads = 0;     // of attention, over all ranks of TP
    bool all_keys = false; // the distributions are over all keys that a query sees, not over those picked alone
    double factor = 0.0;   // of the sum over queries
};
struct AttentionAttr {
    std::int64_t batch = 1, seq_q = 0, seq_k = 0; // rows are position * batch + sequence
    int heads = 0, kv_heads = 0, qk_dim = 0, v_dim = 0;
    std::int64_t q_stride = 0, k_stride = 0, v_stride = 0; // row strides, elements
    std::int64_t q_offset = 0, k_offset = 0, v_offset = 0; // within a row
    std::int64_t window = 0;
    double scale = 1.0;
    bool causal = true;
    std::int64_t picked = 0; // keys that an indexer picks for each query, 0 = none
    int parts = 1;           // picked, pick_keys: members of CP whose keys lie one behind the other, as they gather
    bool kept = false;       // pick_keys: layers behind this one read the choice as well, so that it is not made again
    IndexLoss index;         // of pick_keys_grad
    std::int64_t chunk = 0;  // see Attention; where it begins is an operand as the beginning of a document is
    double visible = 0.5;    // share of the seq_q x seq_k square that the mask leaves (cost only)
    // Step `step` of a CP ring: keys and values are those of the member `step` places before this rank. Each member
    // holds two runs of the sequence, r and 2 ring - 1 - r of 2 ring (zigzag): every step sees half of its square.
    int ring = 1, step = 0;
    bool merge = false; // the steps before are carried on: o and lse, or dq
    bool deterministic = false;
    bool documents = false; // queries see their document alone: the last input has where it begins, by row
};
// Mamba-2's convolution, scan and gated norm, over chunks of the sequence (arXiv 2405.21060 section 7).
struct ScanAttr {
    std::int64_t rows = 0;
    int heads = 0, head_dim = 0, groups = 0, state = 0, chunk = 0;

    double forward_bytes() const;
    double backward_bytes() const;
};
// A layer with a state, a gated delta net (arXiv 2412.06464) or Mamba-2 (ssd; arXiv 2405.21060, where the key heads are
// groups); kernels/kernel_args.hpp has the formulas.
struct StateAttr {
    std::int64_t rows = 0, batch = 1; // rows are position * batch + sequence, of whole sequences
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;
    int parts = 1;     // ranks of CP that share the heads of one rank of TP, whose weights each of them has whole
    double eps = 1e-6; // of the gated norm
    bool ssd = false;
    double step_min = 0.0, step_max = 0.0; // ssd: bounds of a step's width

    std::int64_t keys() const { return std::int64_t{key_heads} * key_dim; }
    std::int64_t values() const { return std::int64_t{value_heads} * value_dim; }
    std::int64_t convolved() const { return 2 * keys() + values(); }
    std::int64_t projected() const { return convolved() + values() + (ssd ? 1 : 2) * value_heads; }
    // Weights of the gated norm: those of one head that all share, or of all.
    std::int64_t norm_weights() const { return ssd ? values() : value_dim; }
    // Elements of the memory that the rule's kernels share, forward or for its gradients.
    std::int64_t work(bool grad) const;
    // Of the rule forward: its products with the state, and a chunk's inner products.
    double flops() const;
};
// Columns [from, from + cols) of x are copied to, or added to, columns [to, to + cols) of y.
struct ColumnsAttr {
    std::int64_t cols = 0, from = 0, to = 0;
    bool accumulate = false;
};
struct ActivationAttr {
    std::int64_t rows = 0, ffn = 0;
    model::Activation function = model::Activation::silu;
    bool gated = true;
    double limit = 0.0;        // LayerKind::swiglu_limit
    bool limit_behind = false; // LayerKind::limit_behind
};
struct RouterAttr {
    std::int64_t tokens = 0;
    int experts = 0, top_k = 0;
    model::Router router;
    std::int64_t batch = 1; // forced: row r of this rank's tokens is of position positions[(first + r) / batch]
};
// Iterations that sinkhorn is priced with.
inline constexpr double sinkhorn_iterations = 10.0;
// Row r of this rank's tokens is of sequence (first + r) modulo batch and of position positions[(first + r) / batch].
struct JitterAttr {
    std::int64_t tokens = 0, cols = 0, batch = 1;
    int layer = 0; // of the whole model, those of MTP behind the others
    double eps = 0.0;
};
// The losses of a layer's router, to which its tokens add; see RouterTraining.
struct BalanceAttr {
    std::int64_t tokens = 0, sequences = 1; // row r belongs to sequence r modulo sequences
    int experts = 0, top_k = 0;
    model::Router router;
    double aux = 0.0; // factor of sum over e of n(e) * (sum of P(t, e)); 0 = only the z-loss
    double z = 0.0;   // factor of the sum of logsumexp^2
};
struct DropAttr {
    std::int64_t tokens = 0; // of this rank
    // Rows that compete: those of `tensor_ranks` ranks of TP one behind the other, of one CP rank behind the other.
    std::int64_t rivals = 0;
    int tensor_ranks = 1;
    // Each expert keeps `capacity` tokens of every sequence; row r belongs to sequence r modulo sequences.
    std::int64_t sequences = 1, capacity = 0;
    int experts = 0, top_k = 0;
    plan::DropPolicy policy = plan::DropPolicy::probs;
};
struct ExpertBiasAttr {
    int experts = 0;
    std::int64_t offset = 0; // place of the bias in its bucket, elements
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
    bool e5m2 = false; // columns are written, too, and are E5M2 as x is
};
// Row movement over EP (and ETP). combine = false: tokens to experts; true: back. Counts come from all_counts[G, E]
// with G = ep ranks (ETP > 1: etp*ep, ETP fastest). Two levels have one each: `ep` domains and slots of `capacity`
// rows, then `ep` ranks of a domain and its experts alone.
struct RowsAttr {
    std::int64_t cols = 0, capacity = 0; // capacity: rows of the expert-side buffer
    int experts = 0, ep = 1, etp = 1;
    bool combine = false;
    bool beside = false; // the slot itself computes something else while tokens travel over peer memory
};
struct LossAttr {
    std::int64_t rows = 0, vocab_local = 0, vocab = 0; // columns >= vocab are padding and take no part
    double scale = 1.0;                                // 1 / tokens of the global batch
    double gradient_scale = 1.0;                       // cross_entropy: of dlogits, where scale is the loss's
};
struct AdamAttr {
    std::int64_t elements = 0; // elements of this rank's shard
    std::int64_t decayed = 0;  // elements of the whole bucket, from its start, that weight decay applies to
};
// Newton-Schulz over the matrices of a bucket (Bucket::Muon), `matrices` of short_side x long_side on the rank that has
// most to do: what it multiplies in all, as so many matrices of one mean shape.
struct MuonAttr {
    int bucket = -1;
    double matrices = 0.0, short_side = 0.0, long_side = 0.0;
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
int first_table_tag(const model::Model& model);
// The side of tokens has the rows of one CP member, runs r and 2 parts - 1 - r of 2 parts, and `pieces` of columns side
// by side (queries, keys, values); the side of heads has the whole sequence in order and 1/parts of every piece.
struct AllToAllAttr {
    bool to_heads = true; // x: tokens -> heads, or back
    int parts = 1;
    std::int64_t rows = 0, cols = 0;      // shape of x
    std::array<std::int64_t, 6> pieces{}; // columns, on the side of tokens; unused ones are 0
};
struct CopyAttr {
    std::int64_t elements = 0;
};
using Attr = std::variant<std::monostate, GemmAttr, GroupedGemmAttr, NormAttr, RopeAttr, MlaRopeAttr, AttentionAttr,
                          ColumnsAttr, ActivationAttr, RouterAttr, PermuteAttr, RowsAttr, LossAttr, AdamAttr,
                          ReduceAttr, PeerAttr, AllToAllAttr, CopyAttr, BalanceAttr, DropAttr, ExpertBiasAttr,
                          JitterAttr, GroupedBiasAttr, QuantizeAttr, ColumnBlocksAttr, RoundAttr, ScanAttr, StateAttr,
                          HeadsNormAttr, ScaleAttr, GateAttr, ClipAttr, ValueNormAttr, MuonAttr>;

} // namespace moe::program
