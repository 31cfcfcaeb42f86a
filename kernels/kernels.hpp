// All kernel signatures: one table of function pointers that every back end fills.
//
// Rules for every kernel
// * Matrices are row-major. Sizes, strides and offsets are in elements; a stride of 0 means dense.
// * `Src` and `Dst` carry their storage type, and any mixture of FP32 and BF16 is allowed; arithmetic is FP32. Plain
//   float and int32 pointers have that type always. Pointers are aligned to their element.
// * An operand marked [x] may be null. "+x" is accumulated into; every other output is overwritten and never read.
// * Outputs may not overlap inputs unless the comment allows it.
// * Counts of routed rows are int32 in device memory. Rows beyond their sum are neither read nor written; counts whose
//   sum exceeds the buffer's capacity are cut at the capacity.
// * The same call on the same numbers gives the same bits while addresses keep their remainder modulo 64 bytes; of
//   attention's gradient on a device only where its shape is `deterministic`.
// * Nothing is allocated per call and nothing is checked: the caller owns the sizes. Calls on different threads are
//   independent. `stream` orders the work of a device back end; the CPU ignores it and returns when the work is done.
#pragma once

#include "kernels/kernel_args.hpp"

#include <cstdint>
#include <string>

namespace moe {

struct Kernels {
    const char* name;

    // x[rows, cols] = table[ids - first]; rows whose id is outside [first, first + vocab_local) are zero.
    void (*embedding)(const std::int32_t* ids, Src table, Dst x, std::int64_t rows, std::int64_t cols,
                      std::int64_t first, std::int64_t vocab_local, void* stream);
    // +dtable[vocab_local, cols]
    void (*embedding_grad)(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                           std::int64_t first, std::int64_t vocab_local, void* stream);

    // y[rows, cols] = x * rstd * w, rstd[rows] = 1 / sqrt(mean x^2 + eps); `stride` is x's row stride. y may be x if
    // dense.
    void (*rmsnorm)(Src x, Src w, Dst y, float* rstd, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                    double eps, void* stream);
    // dx (row stride `stride`) = gradient through the norm + [dresidual[rows, cols]]; +dw[cols]. dx may be dy or
    // dresidual if dense.
    void (*rmsnorm_grad)(Src dy, Src x, Src w, const float* rstd, Src dresidual, Dst dx, float* dw, std::int64_t rows,
                         std::int64_t cols, std::int64_t stride, void* stream);

    // LayerNorm: y = (x - mean x) * rstd * w + [b], rstd = 1 / sqrt(variance of x + eps); stat[rows, 2]: rstd and mean.
    void (*layernorm)(Src x, Src w, Src b, Dst y, float* stat, std::int64_t rows, std::int64_t cols,
                      std::int64_t stride, double eps, void* stream);
    // As rmsnorm_grad, and +[db[cols]].
    void (*layernorm_grad)(Src dy, Src x, Src w, const float* stat, Src dresidual, Dst dx, float* dw, float* db,
                           std::int64_t rows, std::int64_t cols, std::int64_t stride, void* stream);
    // squares[tokens, 2] of this rank's query and key columns.
    void (*heads_squares)(const HeadsNormShape& shape, Src x, float* squares, void* stream);
    // y = x * w / sqrt(squares / all columns + eps) for queries and keys, the other columns copied; y may be x.
    void (*heads_norm)(const HeadsNormShape& shape, Src x, const float* squares, Src wq, Src wk, Dst y, void* stream);
    // along[tokens, 2] = sums of dy * w * x over this rank's query and key columns.
    void (*heads_along)(const HeadsNormShape& shape, Src dy, Src x, Src wq, Src wk, float* along, void* stream);
    // dx from dy, with squares and along of all ranks; +dwq[queries], +dwk[keys]. dx may be dy.
    void (*heads_norm_grad)(const HeadsNormShape& shape, Src dy, Src x, const float* squares, const float* along,
                            Src wq, Src wk, Dst dx, float* dwq, float* dwk, void* stream);

    // y[tokens, front + heads * dim]: the first `front` columns of x, and value heads over their root mean square.
    void (*value_norm)(const ValueNormShape& shape, Src x, Dst y, void* stream);
    // dx, like x, of dy, like y.
    void (*value_norm_grad)(const ValueNormShape& shape, Src dy, Src x, Dst dx, void* stream);

    // y = factor * [w[1]] * x; y may be x.
    void (*scale)(Src x, Src w, double factor, Dst y, std::int64_t n, void* stream);
    // y = x cut at -limit and limit, soft: limit * tanh(x / limit); y may be x.
    void (*clip)(Src x, double limit, bool soft, Dst y, std::int64_t n, void* stream);
    // dx = dy where |x| <= limit, else 0; soft: dy * (1 - tanh(x / limit)^2). dx may be dy.
    void (*clip_grad)(Src dy, Src x, double limit, bool soft, Dst dx, std::int64_t n, void* stream);
    // y = a + b; y may be a or b.
    void (*add)(Src a, Src b, Dst y, std::int64_t n, void* stream);
    // y[rows, cols] = x + b[cols]; y may be x.
    void (*bias_add)(Src x, Src b, Dst y, std::int64_t rows, std::int64_t cols, void* stream);
    void (*copy_columns)(const ColumnsShape& shape, Src x, Dst y, void* stream);
    // +db[cols]
    void (*bias_grad)(Src dy, float* db, std::int64_t rows, std::int64_t cols, void* stream);

    void (*gemm)(const GemmShape& shape, Src a, Src b, Dst c, void* stream);

    // out[tokens, (heads + kv_heads) head_dim + kv_heads v_dim], value heads copied; rstd[tokens, heads + kv_heads]
    // with norm only. out may be qkv unless the caller keeps qkv for rope_grad.
    void (*rope)(const RopeShape& shape, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd,
                 void* stream);
    // dqkv from the gradient dout of `out`; qkv, wq, wk, rstd, +dwq[head_dim], +dwk[head_dim] with norm only. dqkv may
    // be dout.
    void (*rope_grad)(const RopeShape& shape, Src dout, const std::int32_t* positions, Src qkv, Src wq, Src wk,
                      const float* rstd, Dst dqkv, float* dwq, float* dwk, void* stream);

    // q_out[tokens, heads (nope + rope)], k likewise, v[tokens, heads * v] from q, kv[tokens, heads (nope + v)] and
    // kv_down[tokens, kv_lora + rope]. q_out may be q.
    void (*mla_rope)(const MlaRopeShape& shape, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out,
                     Dst k, Dst v, void* stream);
    // It writes only the last `rope` columns of dkv_down (the sum over heads). dq may be dq_out.
    void (*mla_rope_grad)(const MlaRopeShape& shape, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq,
                          Dst dkv, Dst dkv_down, void* stream);

    // The absorbed form, where the latent is every head's key: q_out[tokens, heads (kv_lora + rope)] of
    // absorbed[tokens, heads * kv_lora] and the columns of q that turn, k[tokens, kv_lora + rope] of latent[tokens,
    // kv_lora] and those of kv_down. The shape's v and query_scale have no part in it.
    void (*latent_rope)(const MlaRopeShape& shape, Src q, Src absorbed, Src latent, Src kv_down,
                        const std::int32_t* positions, Dst q_out, Dst k, void* stream);
    // dq of dq_out's last columns and of dq_nope[tokens, heads * nope], dlatent, and the last `rope` columns of
    // dkv_down.
    void (*latent_rope_grad)(const MlaRopeShape& shape, Src dq_out, Src dk, Src dq_nope, const std::int32_t* positions,
                             Dst dq, Dst dlatent, Dst dkv_down, void* stream);

    // keys[rows, top_k], as PickedKeys has them.
    void (*pick_keys)(const IndexShape& shape, Src q, Src k, Src w, std::int32_t* keys, void* stream);
    // Gradients of IndexLossShape's loss: dindex_q, dindex_k and dw like index_q, index_k and w. [keys], unless
    // all_keys. work: shape.work() floats. +[loss[1]], which with [p[rows, shape.width()]] is a part's, see there; p is
    // 0 behind the keys of a query.
    void (*pick_keys_grad)(const IndexLossShape& shape, Src q, Src k, Src index_q, Src index_k, Src w,
                           const std::int32_t* keys, Dst dindex_q, Dst dindex_k, Dst dw, float* work, float* loss,
                           float* p, void* stream);
    // +s[1]: factor * sum over x[n] of x log x, which is 0 where x is.
    void (*xlogx)(const float* x, double factor, float* s, std::int64_t n, void* stream);
    // o[rows, heads * v_dim]
    void (*attention_picked)(const LatentShape& shape, Src q, Src k, const std::int32_t* keys, Dst o, float* lse,
                             void* stream);
    // dk has the gradients of keys and values.
    void (*attention_picked_grad)(const LatentShape& shape, Src dout, Src q, Src k, Src o, const float* lse,
                                  const std::int32_t* keys, Dst dq, Dst dk, void* stream);
    // Row i of x[rows, cols] goes to row positions[i] of cache.
    void (*cache_rows)(Src x, const std::int32_t* positions, Dst cache, std::int64_t rows, std::int64_t cols,
                       void* stream);

    // o[batch * seq_q, heads * v_dim], lse as described at AttentionShape; [sinks[heads]] join the softmax's sum as one
    // more logit whose value row is zero (with merge: give them once).
    void (*attention)(const AttentionShape& shape, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream);
    // Attention of rows that come later than others (generation): of one sequence, row i of k and v goes to row
    // positions[i] of k_cache[seq_k, kv_heads * qk_dim] and v_cache[seq_k, kv_heads * v_dim], and row i of q sees the
    // cached rows up to its position, within the window and, with a chunk, from its chunk's beginning on. Positions are
    // below seq_k; the shape is causal and not spread.
    void (*attention_cached)(const AttentionShape& shape, Src q, Src k, Src v, const std::int32_t* positions, Src sinks,
                             Dst o, Dst k_cache, Dst v_cache, void* stream);
    // dq, dk, dv have the strides and offsets of q, k, v; +[dsinks[heads]]. o and lse are those over all keys.
    void (*attention_grad)(const AttentionShape& shape, Src dout, Src q, Src k, Src v, Src o, const float* lse,
                           Src sinks, Dst dq, Dst dk, Dst dv, float* dsinks, void* stream);

    // A layer with a state, see StateShape. c[rows, convolved] = silu(convolution of p's first columns with
    // w[convolved, kernel], whose last column is of the row itself, + [bias[convolved]]).
    void (*short_conv)(const StateShape& shape, Src p, Src w, Src bias, Dst c, void* stream);
    // Columns [0, convolved) of dp[rows, projected], +dw, +[dbias].
    void (*short_conv_grad)(const StateShape& shape, Src dc, Src p, Src w, Src bias, Dst dp, float* dw, float* dbias,
                            void* stream);
    // o[rows, values]; a_log and dt_bias[value heads]. work: shape.work(false) floats.
    void (*delta_rule)(const StateShape& shape, Src c, Src p, Src a_log, Src dt_bias, Dst o, float* work, void* stream);
    // dc[rows, convolved], the columns of b and a of dp, +da_log, +ddt_bias. work: shape.work(true) floats.
    void (*delta_rule_grad)(const StateShape& shape, Src dout, Src c, Src p, Src a_log, Src dt_bias, Dst dc, Dst dp,
                            float* da_log, float* ddt_bias, float* work, void* stream);
    // The same of Mamba-2, with skip[heads] and +dskip; the gradients' columns of dp are those of dt.
    void (*ssd)(const StateShape& shape, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst o, float* work,
                void* stream);
    void (*ssd_grad)(const StateShape& shape, Src dout, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst dc, Dst dp,
                     float* da_log, float* ddt_bias, float* dskip, float* work, void* stream);
    // y[rows, values]. delta: o / root mean square of its head (eps inside the root) * w[value_dim] * silu(z). ssd: o *
    // silu(z) over the root mean square of its group * w[values].
    void (*gated_norm)(const StateShape& shape, Src o, Src p, Src w, Dst y, void* stream);
    // dout[rows, values], the columns of z of dp, +dw. dout may be dy.
    void (*gated_norm_grad)(const StateShape& shape, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw,
                            void* stream);
    // o of rows that come later than others of one sequence (generation): window[kernel - 1, convolved] holds the rows
    // of p before the first, state[value_heads, key_dim, value_dim] what they left; at position 0 both begin anew.
    void (*delta_cached)(const StateShape& shape, Src p, Src w, Src a_log, Src dt_bias, const std::int32_t* positions,
                         Dst o, Dst window, float* state, void* stream);
    void (*ssd_cached)(const StateShape& shape, Src p, Src w, Src bias, Src a_log, Src dt_bias, Src skip,
                       const std::int32_t* positions, Dst o, Dst window, float* state, void* stream);

    // [y[rows, ffn]] = [q] = curve(gate) * up * [probs[row]]; [counts[groups]] limit the rows.
    void (*activation)(const ActivationShape& shape, Src x, const float* probs, const std::int32_t* counts, Dst y,
                       Fp8Rows q, void* stream);
    // dx like x, [dprobs[rows]] (overwritten), [y] as activation has it, [q] of dx (gated: ffn a multiple of 128). dx
    // may be x.
    void (*activation_grad)(const ActivationShape& shape, Src dy, Src x, const float* probs, const std::int32_t* counts,
                            Dst dx, float* dprobs, Dst y, Fp8Rows q, void* stream);
    // The same where wgrad is in FP8: dx and y are rounded to BF16 and leave what quantize_columns makes of them, dx in
    // both forms. ffn is a multiple of 128.
    void (*activation_grad_columns)(const ActivationShape& shape, Src dy, Src x, const float* probs,
                                    const std::int32_t* counts, float* dprobs, Fp8Rows q, Fp8Columns dx, Fp8Columns y,
                                    void* stream);
    // out[rows, cols] = y * sigmoid(g[rows]), or softplus(g) = ln(1 + e^g); out may be y.
    void (*sigmoid_scale)(Src y, Src g, Dst out, std::int64_t rows, std::int64_t cols, bool softplus, void* stream);
    // dy may be dout.
    void (*sigmoid_scale_grad)(Src dout, Src y, Src g, Dst dy, Dst dg, std::int64_t rows, std::int64_t cols,
                               bool softplus, void* stream);
    // out[rows, cols] = y * p[rows]; [counts[groups]] limit the rows. out may be y.
    void (*scale_rows)(Src y, const float* p, const std::int32_t* counts, Dst out, int groups, std::int64_t rows,
                       std::int64_t cols, void* stream);
    // dy = dout * p, dp[rows] = dout . y (overwritten). dy may be dout.
    void (*scale_rows_grad)(Src dout, Src y, const float* p, const std::int32_t* counts, Dst dy, float* dp, int groups,
                            std::int64_t rows, std::int64_t cols, void* stream);

    // index[tokens, top_k], different experts for each token, from logits[tokens, experts].
    void (*sinkhorn)(const SinkhornShape& shape, Src logits, std::int32_t* index, void* stream);
    // y[tokens, cols] = x * noise in (1 - eps, 1 + eps), the same bits from every back end; y may be x.
    void (*jitter)(const JitterShape& shape, Src x, const std::int32_t* positions, const std::int32_t* noise, Dst y,
                   void* stream);
    // index[tokens, top_k], weight[tokens, top_k] from logits[tokens, experts], [bias[experts]], or from the choice
    // that is given, with weights by the logits. index may be given.recorded.
    void (*router)(const RouterShape& shape, Src logits, Src bias, GivenChoice given, std::int32_t* index,
                   float* weight, void* stream);
    // dlogits[tokens, experts]; the choice itself has no gradient. dlogits may be logits.
    void (*router_grad)(const RouterShape& shape, const float* dweight, Src logits, const std::int32_t* index,
                        Dst dlogits, void* stream);

    // scaled[n] = weight * s[index], 0 where an index is negative; s[experts].
    void (*expert_scale)(const float* weight, const std::int32_t* index, Src s, float* scaled, std::int64_t n,
                         int experts, void* stream);
    // dweight[n] = dscaled * s[index], +ds[experts]; dweight may be dscaled.
    void (*expert_scale_grad)(const float* dscaled, const float* weight, const std::int32_t* index, Src s,
                              float* dweight, float* ds, std::int64_t n, int experts, void* stream);

    // load[sequences, experts] = n(b, e)
    void (*router_load)(const BalanceShape& shape, Src logits, float* load, void* stream);
    // loss[0] += aux * sum over t, e of n(b(t), e) P(t, e) unless load is null, loss[1] += z * sum over t of
    // logsumexp(logits)^2
    void (*router_loss)(const BalanceShape& shape, Src logits, const float* load, float* loss, void* stream);
    // out[tokens, experts] = dlogits + gradient of both losses, load held fixed; out may be dlogits.
    void (*router_loss_grad)(const BalanceShape& shape, Src logits, const float* load, Src dlogits, Dst out,
                             void* stream);
    // sum[n] += counts[n]
    void (*add_counts)(const std::int32_t* counts, float* sum, int n, void* stream);
    // master +- rate where the load[experts] is below or above its mean, w = master in storage precision.
    // Nothing where [overflow[1]] is above 0, or where hyper makes a step with the squared norm s[1] a bad one.
    void (*expert_bias)(const ExpertBiasShape& shape, const float* load, const float* overflow, const float* s,
                        const float* hyper, float* master, Dst w, void* stream);
    // to[n] = index - first for indices in [first, first + local), else -1.
    void (*local_experts)(const std::int32_t* index, std::int32_t* to, std::int64_t n, int first, int local,
                          void* stream);
    // The tokens that go to each domain, those of index[tokens, top_k] that have a choice there, in order:
    // counts[domains], at most slot_rows, and slot_of[tokens, domains], the row in [domains * slot_rows] or -1.
    // [+overflow[1]] takes the tokens too many.
    void (*token_domains)(const DomainShape& shape, const std::int32_t* index, std::int32_t* counts,
                          std::int32_t* slot_of, float* overflow, void* stream);
    // to = index - first of [domains * slot_rows, top_k] choices, where first is that of the domain's experts; -1 for
    // experts of others and in rows beyond the counts[domains, domains], of each sender to each domain.
    void (*domain_experts)(const DomainShape& shape, const std::int32_t* index, const std::int32_t* counts,
                           std::int32_t* to, void* stream);
    // kept[tokens, top_k] = index[rivals, top_k] or -1, kept_weight = weight or 0. positions[rivals / sequences] of the
    // rows, or null: they are in order.
    void (*drop_copies)(const DropShape& shape, const std::int32_t* index, const float* weight,
                        const std::int32_t* positions, std::int32_t* kept, float* kept_weight, void* stream);

    // counts[experts], row_of[tokens * top_k]; copies of one expert keep the order of (t, k). A negative index is a
    // dropped copy: row_of -1, which permute passes over and which adds nothing in unpermute (per_copy: 0).
    // With padded > 0 the rows of expert e start at e * padded, which no count exceeds, and [filled[experts]] = padded.
    void (*permute_map)(const std::int32_t* index, std::int32_t* counts, std::int32_t* row_of, std::int32_t* filled,
                        std::int64_t tokens, int top_k, int experts, std::int64_t padded, void* stream);
    // rows[row_of] = x; with padding all other rows are zero
    void (*permute)(const PermuteShape& shape, Src x, const std::int32_t* row_of, Dst rows, void* stream);
    // What requantize_columns makes of the rows to which permute moves tokens in E4M3 or E5M2; each that counts speak
    // of is some copy's. No padding. token_of[rows.rows]: room for the token of each row.
    void (*permute_columns)(const PermuteShape& shape, const FilledRows& rows, Fp8Rows tokens,
                            const std::int32_t* row_of, const std::int32_t* counts, std::int32_t* token_of,
                            Fp8Columns columns, void* stream);
    // y = sum over k of rows[row_of], in order of k (per_copy: gathered, not summed)
    void (*unpermute)(const PermuteShape& shape, Src rows, const std::int32_t* row_of, Dst y, void* stream);

    // counts[local] = column sums of all_counts[sources, experts] for experts [first, first + local).
    void (*expert_counts)(const std::int32_t* all_counts, std::int32_t* counts, int sources, int experts, int first,
                          int local, void* stream);
    // It sets, where every buffer has room: fitting = counts, fitting_row_of = row_of. Else 0 and -1, so that nothing
    // is routed, and +overflow[1] takes the rows that the fullest buffer lacks.
    void (*fit_rows)(const FitShape& shape, const std::int32_t* counts, const std::int32_t* row_of,
                     std::int32_t* fitting, std::int32_t* fitting_row_of, float* overflow, void* stream);
    // Arrival order -> expert-major order, both [capacity, cols].
    void (*sort_rows)(const RowsShape& shape, Src rows, const std::int32_t* all_counts, Dst sorted, void* stream);
    void (*unsort_rows)(const RowsShape& shape, Src sorted, const std::int32_t* all_counts, Dst rows, void* stream);

    // Rows that hold data, cut at slot_rows and at the capacity; the rest of the slots, or of the buffer, stays as it
    // is.
    void (*rows_to_slots)(const SlotShape& shape, Src rows, const std::int32_t* all_counts, Dst slots, void* stream);
    void (*slots_to_rows)(const SlotShape& shape, Src slots, const std::int32_t* all_counts, Dst rows, void* stream);
    // x[rows, cols] -> y[parts, rows, cols / parts], and back.
    void (*split_columns)(const PartsShape& shape, Src x, Dst y, void* stream);
    void (*join_columns)(const PartsShape& shape, Src x, Dst y, void* stream);

    void (*grouped_gemm)(const GroupedShape& shape, Src a, Src b, const std::int32_t* counts, Dst c, void* stream);
    // C[capacity, n] of A[capacity, k], B[groups, n, k], scales [capacity, ceil(k / 128)] and [groups, ceil(n / 128),
    // ceil(k / 128)]
    void (*scaled_gemm)(const ScaledShape& shape, const std::uint8_t* a, const float* a_scale, const std::uint8_t* b,
                        const float* b_scale, const std::int32_t* counts, Dst c, void* stream);
    // C[groups, n, k] of the columns a[blocks, n, 128] and b[blocks, k, 128].
    void (*scaled_wgrad)(const ScaledGradient& shape, Fp8Columns a, Fp8Columns b, const std::int32_t* counts, Dst c,
                         void* stream);
    // q[rows, cols] and scale[rows, ceil(cols / 128)]: x divided by the scale of its block (fp8_scale), rounded to
    // E4M3. Only rows that counts[groups] say hold data, all where counts is null. Columns are a multiple of 16.
    void (*quantize_rows)(const FilledRows& shape, Src x, const std::int32_t* counts, std::uint8_t* q, float* scale,
                          void* stream);
    // y[rows, cols] = q * scale
    void (*dequantize_rows)(const FilledRows& shape, const std::uint8_t* q, const float* scale,
                            const std::int32_t* counts, Dst y, void* stream);
    // Columns of x[rows, cols], rounded to BF16 first where it is FP32, and of the same values [q], as quantize_rows
    // leaves it. Columns are a multiple of 16.
    void (*quantize_columns)(const FilledRows& shape, Src x, const std::int32_t* counts, Fp8Rows q, Fp8Columns columns,
                             void* stream);
    // Columns of what the rows q stand for, in BF16. No column of a block has a larger scale than its rows have, so
    // that rows with one scale lose nothing.
    void (*requantize_columns)(const FilledRows& shape, Fp8Rows q, const std::int32_t* counts, Fp8Columns columns,
                               void* stream);
    // Weights w[groups, n, k], rounded to BF16 first where they are FP32, in blocks of 128 x 128: as they are,
    // q[groups, n, k], scale[groups, ceil(n / 128), ceil(k / 128)], and transposed, qt[groups, k, n] with its scales. n
    // and k are multiples of 16. Or all with one scale: QuantizedWeights::one_scale.
    void (*quantize_weights)(const QuantizedWeights& shape, Src w, std::uint8_t* q, float* scale, std::uint8_t* qt,
                             float* qt_scale, void* stream);
    // [by_row[rows, cols]] and [by_column[rows, cols]], BF16: x in values of the format, whose blocks lie in a row or
    // in a column; and RoundShape::codes. Only rows that counts[groups] say hold data. largest[2] is where the largest
    // magnitudes of x and of what is rounded in its columns are found, for formats with a scale of the tensor; with
    // RoundShape::window
    // [+largest[1]]: the larger one of what stands there and of x's. positions and noise are for stochastic rounding.
    void (*round_operand)(const RoundShape& shape, Src x, const std::int32_t* counts, const std::int32_t* positions,
                          const std::int32_t* noise, float* largest, Dst by_row, Dst by_column, void* stream);
    // y[r] = rows[r] + share * b[expert of r] * [probs[r]]; y may be rows.
    void (*grouped_bias_add)(Src rows, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                             std::int64_t cols, std::int64_t capacity, float share, void* stream);
    // +db[groups, cols] = share * drows * [probs], [dprobs[capacity]] = share * drows . b
    void (*grouped_bias_grad)(Src drows, const std::int32_t* counts, Src b, const float* probs, float* db,
                              float* dprobs, int groups, std::int64_t cols, std::int64_t capacity, float share,
                              void* stream);

    // max[rows] over this slice's real columns, -infinity if it has none.
    void (*ce_max)(const LossShape& shape, Src logits, float* max, void* stream);
    // stat[rows, 2]: sum of exp(logit - max) over this slice, logit of the label (0 if the label is not in this slice);
    // a row of a negative label has none: (0, 0), no loss and no gradient.
    void (*ce_sum)(const LossShape& shape, Src logits, const float* max, const std::int32_t* labels, float* stat,
                   void* stream);
    // +loss[1] = scale * sum over rows of log(sum) + max - label's logit
    void (*ce_loss)(const LossShape& shape, const float* max, const float* stat, float* loss, void* stream);
    // dlogits = scale * (softmax - one at the label), padding columns 0; dlogits may be logits.
    void (*ce_grad)(const LossShape& shape, Src logits, const float* max, const float* stat, const std::int32_t* labels,
                    Dst dlogits, void* stream);
    // All of them for a vocabulary in one slice: max, stat, +loss[1] and dlogits, which takes gradient_scale instead of
    // scale and may be logits.
    void (*cross_entropy)(const LossShape& shape, double gradient_scale, Src logits, const std::int32_t* labels,
                          float* max, float* stat, float* loss, Dst dlogits, void* stream);

    void (*zero)(Dst x, std::int64_t n, void* stream);
    // y[i] = FP32(scale * standard normal deviate number first + i of the random stream `key`), by kernels/deviate.hpp:
    // the same bits from every back end, in any order of calls.
    void (*draw_normal)(std::uint64_t key, std::int64_t first, double scale, float* y, std::int64_t n, void* stream);
    // +s[1]
    void (*sum_squares)(Src x, float* s, std::int64_t n, void* stream);
    // AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101) on g times the clip factor
    // clip / (norm + 1e-6) when clip > 0 and norm > clip, norm = sqrt(s[0]); [w] = master in storage precision.
    // Nothing is written where [overflow[1]] is above 0, or where hyper makes the step a bad one.
    void (*adamw)(const AdamShape& shape, const float* g, const float* s, const float* hyper, const float* overflow,
                  float* master, Dst m, Dst v, Dst w, void* stream);
    // adamw with m in MXFP8: code[elements] of E4M3 and scale[elements / 32] of E8M0, the least power of two by which
    // the largest of its 32 values is at most 448. Shards and what they are cut into are of whole blocks.
    void (*adamw_mxfp8)(const AdamShape& shape, const float* g, const float* s, const float* hyper,
                        const float* overflow, float* master, std::uint8_t* code, std::uint8_t* scale, Dst v, Dst w,
                        void* stream);

    // Muon (arXiv 2502.16982 section 2.2), where it differs from AdamW; what is not written then is not written here.
    // m = momentum m + g times the clip factor, and g becomes the update of Nesterov: that gradient + momentum m.
    void (*momentum)(double momentum, float* g, const float* s, const float* hyper, const float* overflow, Dst m,
                     std::int64_t n, void* stream);
    // y = x / max(sqrt(s[0]), eps of hyper); y may be x.
    void (*unit)(Src x, const float* s, const float* hyper, Dst y, std::int64_t n, void* stream);
    // master -= lr * rate * (factor o + decay master), of AdamShape, all of whose elements decay; [w] as in adamw.
    void (*orthogonal_step)(const AdamShape& shape, double factor, Src o, const float* s, const float* hyper,
                            const float* overflow, float* master, Dst w, void* stream);

    void (*cast)(Src x, Dst y, std::int64_t n, void* stream);
    // dst = srcs[0] + srcs[1] + ... in this order, in FP32; dst may be one of them.
    void (*reduce_sum)(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream);
    void (*reduce_max)(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream);
};

// The reference back end. Every entry is set. Call cpu_supported() before the first kernel.
const Kernels& cpu_kernels();

// True where this machine runs the instructions the CPU kernels are compiled for; if not, `why` names the missing ones.
bool cpu_supported(std::string& why);

} // namespace moe
