// Latent attention over picked keys, with parts that others lack: GLM-5.3-Flash, whose heads turn nothing beside layers
// of Kimi delta attention, and Mistral Large 4, whose queries are projected directly. Counted and priced, not trained.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

namespace moe::families {
namespace {

// Heads of a width, of which `rope` columns turn, over keys that an indexer picks.
model::Attention read_picking(const JsonObject& json, int rope) {
    model::Attention attention;
    attention.kind = model::AttentionKind::mla;
    attention.heads = attention.kv_heads = integer(json, "num_attention_heads", max_heads);
    attention.rope_dim = rope;
    attention.qk_dim = integer(json, "qk_nope_head_dim", max_dim / 2) + rope;
    attention.v_dim = integer(json, "v_head_dim", max_dim);
    attention.kv_lora = integer(json, "kv_lora_rank", max_hidden);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    attention.indexer_heads = integer_or(json, "index_n_heads", 32, 1, max_heads);
    attention.indexer_dim = integer_or(json, "index_head_dim", 128, 1, max_dim);
    attention.indexer_top_k = integer_or(json, "index_topk", 2048, 1, max_window);
    return attention;
}

// Adds a layer of experts or of the MLP as the class says, the first so many of which are dense.
void add_sparse(const JsonObject& json, model::Model& model, const model::Attention& attention, bool experts,
                const model::Moe& moe) {
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.attention = attention;
    if (experts)
        kind.moe = moe;
    else
        kind.dense_ffn = ffn(json, "intermediate_size");
    add_layer(model, kind);
}

} // namespace

// Its indexer pools index_kpool keys in one by weights of its own; streams end in their mean, without weights.
void read_glm5_next(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.residual_streams = integer_or(json, "hc_mult", 4, 2, 64);
    const std::int64_t streams = model.residual_streams;
    model.other_weights = -(streams * streams * model.hidden + streams + 1); // of the map that others end in
    pass_over(json, {"hc_eps", "hc_sinkhorn_iters", "linear_lower_bound", "index_kpool_always_select_tail",
                     "qk_rope_head_dim", "swiglu_limit"});
    const int layers = layer_count(json), pool = integer_or(json, "index_kpool", 16, 1, max_dim);
    model::Attention full = read_picking(json, 0);
    full.q_lora = integer(json, "q_lora_rank", max_hidden);
    const model::OpaquePart pooling =
        opaque_part("pools of an indexer", {0, full.indexer_dim * (model.hidden + std::int64_t{pool})});
    DeltaByChannel delta;
    delta.heads = integer_or(json, "linear_num_heads", 64, 1, max_heads);
    delta.width = integer_or(json, "linear_head_dim", 128, 1, max_dim);
    delta.taps = integer_or(json, "linear_conv_kernel_dim", 4, 1, 1024);
    const model::Attention linear = opaque_mixer(delta_by_channel(model.hidden, delta));
    model::Moe moe = read_experts(json, "n_routed_experts", "n_shared_experts", 1);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 2.5);
    std::vector<bool> deltas = one_of_each(4, 3, layers);
    deltas.flip();
    deltas = layers_of_type(json, "linear_attention", layers, deltas);
    const std::vector<bool> shared = layers_that_share(json), sparse = layers_with_experts(json, 3);
    for (std::size_t layer = 0; layer < deltas.size(); ++layer) {
        model::Attention attention = deltas[layer] ? linear : full;
        attention.shares_index = !deltas[layer] && shared[layer];
        if (attention.indexes()) join(attention.opaque, pooling);
        add_sparse(json, model, attention, sparse[layer], moe);
    }
    model.not_executable = "index_kpool: pooled keys of an indexer are not trained yet";
}

// Every fourth layer turns nothing, with the columns that turn elsewhere among the others; heads scale their products
// by the position; frequencies are learned.
void read_mistral_large4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.logit_cap = json.number_or("final_logit_softcapping", 30.0, 1e-6, 1e6);
    const int layers = layer_count(json), rope = integer(json, "qk_rope_head_dim", max_dim / 2);
    model.other_weights = rope / 2;
    if (json.is_array("kv_source_layers")) {
        const std::vector<std::int64_t> sources = json.integers("kv_source_layers", 0, layers - 1);
        for (std::size_t layer = 0; layer < sources.size(); ++layer)
            if (sources[layer] != static_cast<std::int64_t>(layer))
                json.refuse_value("kv_source_layers", "layers that take keys and values of others are not supported");
    }
    pass_over(json, {"no_rope_layer_interval", "mlp_bias"});
    model::Attention turning = read_picking(json, rope), still = turning;
    still.rope_dim = 0;
    model::Moe moe = read_experts(json, spelled(json, "n_routed_experts", "num_local_experts"), "n_shared_experts", 1);
    moe.router.normalize = true;
    moe.router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    moe.router.groups = integer_or(json, "n_group", 1, 1, max_experts);
    moe.router.groups_kept = integer_or(json, "topk_group", 1, 1, max_experts);
    moe.router.group_score_top = 2;
    std::vector<bool> turns = every(integer_or(json, "no_rope_layer_interval", 4, 1, max_layers), layers);
    turns.flip();
    if (json.is_array("no_rope_layers")) turns = flags(json, "no_rope_layers", layers);
    const std::vector<bool> shared = layers_that_share(json), sparse = layers_with_experts(json, 1);
    for (std::size_t layer = 0; layer < turns.size(); ++layer) {
        model::Attention attention = turns[layer] ? turning : still;
        attention.shares_index = shared[layer];
        const std::int64_t index = attention.indexes() ? 2 * (model.hidden + attention.indexer_heads) : 0;
        attention.opaque = opaque_part("scales by position and a norm of an indexer", {0, 2 * attention.heads + index});
        add_sparse(json, model, attention, sparse[layer], moe);
    }
}

} // namespace moe::families
