// The scratch that attention takes of a GPU and the buffers of a dispatcher, by the shapes of a plan's layers.
#include "planner/memory/library_memory.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/block_scaling.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>

namespace moe::memory {

namespace {

constexpr std::int64_t slice_bytes = std::int64_t{9} << 28, most_bytes = std::int64_t{4} << 30, least_chunk = 512;

std::int64_t rounded(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
std::int64_t divided_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// The largest piece of a backward: what one call of the library computes.
struct Piece {
    std::int64_t sequences, key_heads, heads, queries, keys;
    bool shares_keys; // whether pieces share keys, whose key gradients are summed beside them
    std::int64_t score_bytes() const { return rounded(queries, 64) * rounded(keys, 128) * 2; } // bytes of a head
};

// The largest piece, cut as kernels/cuda/attention/attention_pieces.cu cuts it.
Piece largest_piece(const AttentionWork& w) {
    const std::int64_t share = w.heads / std::max<std::int64_t>(w.kv_heads, 1);
    Piece p{w.batch, w.kv_heads, share, w.seq, w.seq, false};
    if (!w.deterministic) { // One call takes all.
        p.heads = w.heads;
        return p;
    }
    const auto see = [&](std::int64_t queries) {
        p.queries = queries;
        p.keys = w.window > 0 && queries < w.seq ? std::min(w.seq, queries + w.window) : w.seq;
    };
    const std::int64_t chunk = std::max(least_chunk, rounded(w.window, 128));
    if (w.window > 0 && 4 * chunk <= w.seq) see(chunk);
    while (p.score_bytes() > slice_bytes && p.queries > least_chunk) see(rounded(p.queries / 2, 64));
    const auto at_most = [](std::int64_t wanted, std::int64_t bytes) {
        return std::clamp<std::int64_t>(slice_bytes / bytes, 1, std::max<std::int64_t>(wanted, 1));
    };
    const std::int64_t head = p.score_bytes();
    const std::int64_t of_group = divided_up(share, divided_up(share, at_most(share, head)));
    p.shares_keys = of_group < share || p.queries < w.seq;
    p.key_heads = of_group < share ? 1 : at_most(w.kv_heads, share * head);
    p.sequences = p.key_heads < w.kv_heads ? 1 : at_most(w.batch, w.heads * head);
    p.heads = p.key_heads * of_group;
    return p;
}

// The scratch of our own deterministic backward, 0 where the library has it: ordered_attention_bytes() of
// kernels/cuda/attention/attention_ordered_grad.cu, with kept sums whether the cache asks for them or not.
std::int64_t ordered_scratch(const AttentionWork& w) {
    constexpr std::int64_t keys = 128;
    const bool known = (w.qk_dim == 64 && w.v_dim == 64) || ((w.qk_dim == 128 || w.qk_dim == 192) && w.v_dim == 128);
    if (!w.deterministic || w.multiprocessors == 0 || w.window > 0 || !known) return 0;
    const std::int64_t team = divided_up(divided_up(w.seq, keys), 2), groups = w.batch * w.kv_heads,
                       teams = std::min(w.multiprocessors / team, groups);
    if (teams == 0 || 5 * groups * team < 4 * divided_up(groups, teams) * w.multiprocessors) return 0;
    const std::int64_t queries = w.qk_dim == 64 ? 128 : 64, rows = w.batch * w.heads * rounded(w.seq, queries);
    const std::int64_t kept = w.heads > w.kv_heads ? team * teams * 2 * keys * (w.qk_dim + w.v_dim) * 4 : 0;
    return rows * (w.qk_dim * 4 + 8) + rows / queries * 4 + kept;
}

} // namespace

bool has_own_backward(const AttentionWork& w) { return ordered_scratch(w) > 0; }

double attention_scratch(const AttentionWork& w) {
    if (const std::int64_t own = ordered_scratch(w); own > 0) return static_cast<double>(own);
    const Piece p = largest_piece(w);
    if (w.deterministic && p.score_bytes() > most_bytes) return 0.0;
    const std::int64_t heads = p.sequences * p.heads, key_heads = p.sequences * p.key_heads, width = w.qk_dim + w.v_dim;
    std::int64_t bytes = 256 + rounded(heads * p.queries * 4, 256);
    bytes += w.deterministic ? heads * p.score_bytes() : rounded(heads * p.queries * w.qk_dim * 4, 256);
    if (p.heads > p.key_heads) bytes += heads * p.keys * width * 2;
    if (p.shares_keys) bytes += key_heads * width * (w.seq * 4 + p.keys * 2);
    return static_cast<double>(bytes);
}

namespace {

// A ring's steps are squares and halves of them; a further result of every query lies beside them until it is merged.
double ring_scratch(const AttentionWork& w) {
    if (w.window > 0) return 0.0; // Windows are left to the plain kernels.
    const std::int64_t rows = w.batch * w.seq * w.heads;
    AttentionWork library = w; // may have the steps without a mask
    library.multiprocessors = 0;
    return std::max(attention_scratch(w), attention_scratch(library)) +
           static_cast<double>(rows * std::max(2 * w.qk_dim, 2 * w.v_dim + 4));
}

} // namespace

double hybrid_ep_buffers(const HybridEpGroup& g) {
    const std::int64_t tokens = std::max<std::int64_t>(rounded(g.tokens, 16), 512), all = tokens * g.ranks * g.domains;
    const std::int64_t experts = g.experts * g.ranks, token = 2 * g.width + 4 * experts; // experts: of a domain
    // Scales have their room whether tokens are quantized or not.
    std::int64_t bytes = all * (token + g.width / 128 * 4);
    if (g.domains == 1) return static_cast<double>(bytes); // Both calls share it.
    bytes += all * token;
    bytes += tokens * (2 * g.width + 4 * experts * g.domains); // bytes of tokens that leave
    bytes += 3 * tokens * (g.domains - 1) * token;             // others' tokens: dispatched, summed up here, combined
    return static_cast<double>(bytes);
}

double deep_ep_buffers(std::int64_t width, std::int64_t ranks) {
    constexpr std::int64_t channels = 10, peers = 8, choices = 128;
    const std::int64_t nodes = divided_up(ranks, peers);
    const std::int64_t near = ranks <= 8 ? 256 : ranks <= 64 ? 288 : ranks <= 96 ? 480 : ranks <= 128 ? 560 : 720;
    const std::int64_t far = ranks <= 16 ? 140 : ranks <= 64 ? 128 : 132; // tokens in whole chunks
    const std::int64_t token = 2 * width + 8 + choices * (8 + 4 + 4); // bytes with source, choices, weights and scales
    std::int64_t bytes = channels * std::min(ranks, peers) * (4 * (2 * nodes + 3) + near * token);
    if (nodes > 1) bytes += channels * nodes * 2 * (4 * (2 * peers + 2) + far * (token + 16)) + (1 << 20);
    return static_cast<double>(rounded(bytes, 128) + (32 << 20)); // The last term is a workspace.
}

namespace {

double dispatcher_memory(const plan::Plan& plan) {
    double most = 0.0;
    const int group = plan.ep * plan.etp;
    if (!plan::stack_traits(plan).holds_dispatcher_buffers || plan.hardware->cpu || group == 1) return most;
    int ranks = std::min(group, std::max(1, plan.hardware->nvlink_domain_used));
    while (group % ranks != 0) --ranks;
    for (const model::LayerKind& kind : plan.model->kinds) {
        if (!kind.moe) continue;
        const std::int64_t width = kind.moe->latent > 0 ? kind.moe->latent : plan.model->hidden;
        if (plan.dispatcher == plan::Dispatcher::deepep && plan::stack_traits(plan).holds_deep_ep_buffers)
            most = std::max(most, deep_ep_buffers(width, group));
        // NCCL EP registers windows of its own; taken as large as HybridEP's, until somebody says.
        if (plan::groups_by_expert(plan.dispatcher))
            most = std::max(most, hybrid_ep_buffers(
                                      {plan.tokens_local(), width, kind.moe->experts / plan.ep, ranks, group / ranks}));
    }
    return most;
}

} // namespace

double library_memory(const plan::Plan& plan) {
    double scratch = 0.0;
    // Documents and chunks are left to our own kernels, which take none.
    const bool library = plan::stack_traits(plan).takes_attention_scratch && !plan.hardware->cpu &&
                         plan.precision != machine::Precision::fp32 && !plan.masks_documents();
    const int heads_of = plan.tp * plan::context_inner(plan), steps = plan.cp / plan::context_inner(plan);
    const bool ring = steps > 1;
    for (const model::LayerKind& kind : plan.model->kinds) {
        const model::Attention& a = kind.attention;
        if (!library || a.chunk > 0 || (a.kind != model::AttentionKind::gqa && a.kind != model::AttentionKind::mla))
            continue;
        const int kv_heads = a.kind == model::AttentionKind::mla ? a.heads : a.kv_heads;
        const AttentionWork work{plan.mbs,
                                 std::max(1, a.heads / heads_of),
                                 std::max(1, kv_heads / heads_of),
                                 a.qk_dim,
                                 a.v_dim,
                                 plan.seq / steps,
                                 a.window,
                                 plan.deterministic,
                                 plan.hardware->compute_capability == 9.0 ? plan.hardware->sm_count : 0};
        scratch = std::max(scratch, ring ? ring_scratch(work) : attention_scratch(work));
    }
    // Behind the first copy between host and device: an H200 took 6 and 8 MiB
    // (profiles/measured/h200-2026-11-21-check).
    constexpr double copying = 7 << 20;
    const bool copies = plan.offload != 0 && plan::stack_traits(plan).counts_first_copy && !plan.hardware->cpu;
    const double packed = plan::scales_blocks(plan) ? static_cast<double>(plan::block_scaled_scratch) : 0.0;
    return plan.hardware->context_bytes + scratch + packed + (copies ? copying : 0.0) + dispatcher_memory(plan);
}

} // namespace moe::memory
