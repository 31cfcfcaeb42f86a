// The kinds of ops with their operands, and the streams, modules and phases that ops belong to.
#pragma once

#include <cstdint>

namespace moe::program {

enum class OpKind : std::uint8_t {
    // Each line: inputs -> outputs. S = gathered tokens, T = local tokens, K = top-k, E experts, El local experts,
    // cap = planned rows of a routed buffer. [x] optional, +x accumulated into.
    embedding,      // ids[S], table[V/tp, h] -> x[S, h]; rows of ids outside this rank's vocabulary slice are zero
    embedding_grad, // ids[S], dx[S, h] -> +dtable[V/tp, h]
    rmsnorm,        // x[R, C (stride)], w[C], [b[C]] -> y[R, C], rstd[R] (LayerNorm: and the mean, [R, 2]); NormAttr
    rmsnorm_grad, // dy[R, C], x, w, rstd, [dresidual[R, C]] -> dx[R, C (stride)] = grad (+ dresidual), +dw[C], [+db[C]]
    heads_squares,   // x[S, W] -> squares[S, 2]: of a row's query heads and of its key heads; HeadsNormAttr
    heads_norm,      // x, squares, wq, wk -> y[S, W]: queries and keys by their norm, the rest copied
    heads_along,     // dy[S, W], x, wq, wk -> along[S, 2]: sums of dy w x, as heads_norm_grad needs them
    heads_norm_grad, // dy, x, squares, along, wq, wk -> dx[S, W], +dwq, +dwk
    value_norm,      // x[S, W'] -> y[S, W]: value heads by their norm, the rest copied; ValueNormAttr
    value_norm_grad, // dy[S, W], x -> dx[S, W']
    scale,           // x, [w[1]] -> factor * w * x; ScaleAttr
    clip,            // x -> x cut at -limit and limit, hard or soft; ClipAttr
    clip_grad,       // dy, x -> dy times the slope of that
    add,             // a, b -> a + b
    bias_add,        // x[R, C], b[C] -> x + b
    copy_columns,    // x[R, W] -> y[R, W']: a range of columns copied or added; ColumnsAttr
    bias_grad,       // dy[R, C] -> +db[C]
    gemm,            // A, B -> C or +C; GemmAttr
    rope,      // qkv[S, W], positions[S/b], [wq[d], wk[d]] -> qkv'[S, W], [rstd[S, heads+kv]]: QK-norm and rotation, v
               // copied
    rope_grad, // dqkv'[S, W], positions, [qkv, wq, wk, rstd] -> dqkv[S, W], [+dwq, +dwk]
    mla_rope, // q[S, n(dn+dr)], kv[S, n(dn+dv)], kv_down[S, c+dr], positions -> q'[S, n(dn+dr)], k[S, n(dn+dr)], v[S, n
              // dv]
    mla_rope_grad, // dq', dk, dv, positions -> dq, dkv, dkv_down[:, c:c+dr] (summed over heads)
    latent_rope,   // q[S, n(dn+dr)], absorbed[S, nc], latent[S, c], kv_down[S, c+dr], positions -> q'[S, n(c+dr)], k[S,
                   // c+dr]: of all heads one key, the latent and what turns; MlaRopeAttr
    latent_rope_grad, // dq', dk, dq of the columns that do not turn[S, n dn], positions -> dq, dlatent, dkv_down[:, c:]
    attention,        // q, k, v, [sinks], [o, lse of a ring's steps before], [document starts[S]] -> o[S, heads*dv],
                      // lse[heads*S]; AttentionAttr (q, k, v may be one packed tensor)
    attention_grad, // do, q, k, v, o, lse, [sinks], [dq of a ring's steps before], [document starts[S]] -> dq, dk, dv,
                    // [+dsinks] (packed like q, k, v)
    attention_cached, // q, k, v (packed or not), positions[S/b], [sinks] -> o[S, heads*dv], +k cache[keys, kv*dqk], +v
    // cache[keys, kv*dv]: rows are put at their positions, and see those up to their own; AttentionAttr
    // Sparse attention: its ops `attention` and `attention_grad` read keys behind q, k, v and behind lse, and values
    // are
    // the first columns of k.
    pick_keys, // index q[S, n d], index k[Sk, d], w[S, n], [document starts[S]], [positions: generation] -> keys[S, top
               // k] i32: the positions of the largest sums over heads of w * relu(q k), in order and then -1;
               // AttentionAttr
    pick_keys_grad, // q, k, index q, index k, w, keys, [document starts] -> dindex q, dindex k, dw, work,
                    // [+loss[1]], [p[S, keys] f32]: of the divergence between the indexer's and the attention's
                    // distribution p; where p is of the heads of one rank of TP, loss lacks xlogx of their sum;
                    // AttentionAttr::index
    xlogx,          // x[R, C] f32 -> +s[1]: factor * sum of x log x; ScaleAttr
    cache_rows,     // x[S, C], positions[S] -> +cache[keys, C]: rows are put at their positions (generation)
    scan,           // zxbcdt[S, W] -> y[S, n p], y normed and gated[S, n p]: Mamba-2 as published stacks run it, from
                    // the convolution to the norm; ScanAttr (cost only)
    scan_grad,      // dout[S, n p], zxbcdt, y -> dzxbcdt[S, W]
    // Layers with a state; p is the projection's row and starts[S] where the document of a row begins; StateAttr.
    short_conv,      // p[S, W], w[C, kernel], [bias[C]], [starts] -> c[S, C] = silu(convolution of p's first C columns)
    short_conv_grad, // dc[S, C], p, w, [bias], [starts] -> dp[S, W] (columns of c), +dw, [+dbias]
    delta_rule,      // c, p, a_log[n], dt_bias[n], [starts] -> o[S, n dv], work: gated delta nets
    delta_rule_grad, // do, c, p, a_log, dt_bias, [starts] -> dc, dp (columns of gates), +da_log, +ddt_bias, work
    ssd,             // c, p, a_log[n], dt_bias[n], skip[n], [starts] -> o[S, n dv], work: Mamba-2
    ssd_grad,        // do, c, p, a_log, dt_bias, skip, [starts] -> dc, dp (dt), +da_log, +ddt_bias, +dskip, work
    gated_norm,      // o, p, w -> y[S, n dv]: norm and gate z; w[dv], of Mamba-2 [n dv]
    gated_norm_grad, // dy, o, p, w -> do, dp (columns of z), +dw
    delta_cached,    // p, w, a_log, dt_bias, positions -> o, +window of the convolution, +state: generation
    ssd_cached,      // p, w, bias, a_log, dt_bias, skip, positions -> o, +window, +state
    activation,      // x[R, 2f or f], [probs[R]], [counts] -> [y[R, f] = act(gate)*up (* prob)], [y quantized]
    activation_grad, // dy[R, f], x, [probs], [counts] -> dx[R, 2f or f], [dprobs[R]], [y], [dx quantized]; or, where
    // wgrad is in FP8, of y and dx no BF16: -, [dprobs], fp8_columns of y, dx quantized, its fp8_columns
    sigmoid_scale,      // y, g -> y * sigmoid(g): each gate is of as many neighbours as there are; GateAttr
    sigmoid_scale_grad, // dout, y, g -> dy, dg
    scale_rows,         // rows[R, C], p[R], [counts] -> rows * p
    scale_rows_grad,    // dout[R, C], rows, p, [counts] -> drows, dp
    jitter,             // x[T, C], positions[S/b], noise[3] -> x times noise, or dx of dy likewise; JitterAttr
    sinkhorn,           // logits[T, E] -> index[T, K]: the best behind Sinkhorn's iteration; RouterAttr
    router,             // logits[T, E], [bias[E]], [forced positions], [recorded] -> index[T, K] i32, weight[T, K] f32
    router_grad,        // dweight[T, K], logits, index -> dlogits[T, E]
    expert_scale,       // weight[T, K], index, s[E] -> weight * s[index]
    expert_scale_grad,  // dscaled[T, K], weight, index, s -> dweight[T, K], +ds[E]
    router_load,        // logits[T, E] -> load[B, E] f32: tokens of each sequence (B = 1: of all) by their best scores
    router_loss,        // logits, [load] -> +loss[2]: auxiliary loss and z-loss of these tokens; BalanceAttr
    router_loss_grad,   // logits, [load], dlogits -> dlogits + gradient of both losses
    add_counts,         // counts[E] i32 -> +sum[E] f32
    drop_copies,   // index[R, K], weight, [positions of rows] -> of T rows index with -1 where dropped, weight with
                   // 0 there; DropAttr
    local_experts, // index[T, K] -> index counted from this rank's first expert, -1 for those of others; RowsAttr
    // Dispatch in two levels: the tokens of this rank for each of D NVLink domains, which travel in slots of S rows,
    // RowsAttr::capacity; those beyond S have no place (-1) and are added to overflow. RowsAttr, with ep = D.
    token_domains,  // index[T, K] -> counts[D] i32, slot_of[T*D] i32: row of the token in the slots [D*S],
                    // [+overflow[1]]
    domain_experts, // index[D*S, K] as it came, counts[D, D] of all -> index counted from the domain's first expert, -1
                    // for experts of other domains and in rows without a token
    expert_bias,    // load[E], [overflow[1]], s[1], hyper[9] -> +master, w[n]: this rank's shard of the bucket of
                    // the bias, unless rows overflowed or the step is bad; ExpertBiasAttr
    permute_map,    // index[T, K] -> counts[E] i32, row_of[T*K] i32: position of copy (t, k) in expert-major order, -1
                    // where index is negative
    permute,       // x[T, C], row_of -> rows[T*K, C], quantized ones with their scales; also weight[T, K] as C = 1 with
                   // one value per copy (PermuteAttr). Of quantized x with wgrad in FP8: x, row_of, counts -> [rows],
                   // fp8_columns of them, token_of[T*K] i32
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
    quantize, // x, [counts] -> [xq (row-wise)], [xq transposed]; x in BF16, or row-wise itself, of which fp8_columns
              // are made: ColumnBlocksAttr. Weights as our kernels read them: w (BF16 or FP32, rounded to BF16) -> both
    // forms in one tensor; QuantizeAttr. Of one_scale: w, [windows] -> both, largest[1]. fp8-tensor and emulated
    // precisions: x, [counts], [positions, noise], [windows] -> [x in values that blocks of columns represent, or rows
    // in fp8_block], [of rows, or what those stand for], [largest[2]]; RoundAttr. With windows that of the slot is what
    // the scale is of, and [+largest] is ProgramIo::scale_largest
    dequantize, // xq (row-wise), [counts] -> x in BF16
    cast,       // x -> y in another dtype, element by element
    ce_max,     // logits[S, V/tp] -> max[S]
    ce_sum,     // logits, max, labels[S] -> stat[S, 2]: sum of exp, logit of the label (0 if not in this slice)
    // The losses multiply their scale by a share[1] where one is given.
    ce_loss,       // max, stat, [share] -> +loss[1]: scale * sum over rows with a label of -log softmax
    ce_grad,       // logits, max, stat, labels, [share] -> dlogits[S, V/tp], times scale
    cross_entropy, // logits[S, V], labels, [share] -> dlogits over logits, max, stat, +loss[1]: all four, without
                   // slices
    zero,          // -> x = 0
    sum_squares,   // x -> +s[1]
    adamw,         // g[n], s[1], hyper[9], master, m, v, [overflow[1]] -> master, m, v, w[n] in storage precision, or
                   // none of them where rows overflowed; no w where the next step quantizes master; AdamAttr
    adamw_on_host, // adamw over operands in host memory, by the host's cores
    momentum,      // +g[n], s[1], hyper[9], m, [overflow[1]] -> m, g = Nesterov's update; none where adamw writes none
    collect,       // g of the whole bucket -> the window of MuonAttr around this rank's shard; MuonAttr
    newton_schulz, // updates, s[1], hyper[9], master, [overflow[1]] -> master, [w[n]], work, norm[1]: the matrices that
                   // this rank's shard touches, orthogonalized; MuonAttr
    // communication; group of size 1 is never emitted
    all_gather,          // x[R, C] -> y[G*R, C] in group order
    reduce_scatter,      // x[G*R, C] -> y[R, C], summed in group order
    all_reduce,          // x -> y (may be the same tensor), sum or max; ReduceAttr
    all_to_all_rows,     // rows, all_counts -> rows: dispatch or combine over EP; RowsAttr
    all_gather_rows,     // rows[cap, C], all_counts -> rows[etp*cap, C] over ETP, members' valid rows one after another
    reduce_scatter_rows, // the inverse with a sum over ETP
    all_to_all,          // x[R, C] -> y: heads of the whole sequence <-> all heads of this rank's tokens; AllToAllAttr
    all_to_all_slots,    // x[D*S, C], counts[D, D] i32 -> y[D*S, C]: slot d goes to member d, which holds counts[me][d]
                         // rows of data (combine: back, counts[d][me]); devices may send more of a slot; RowsAttr
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

} // namespace moe::program
