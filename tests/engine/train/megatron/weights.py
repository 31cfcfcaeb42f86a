"""Weights of a model by their names and places in transformers, and what Megatron-Core's parameters are made of."""
import re

import numpy as np

VOCAB = 61


def values(name, shape):
    """A value for each place, the same as values_of in megatron_test.cpp: exact in BF16, norms about 1."""
    key = np.uint64(14695981039346656037)
    with np.errstate(over="ignore"):
        for byte in name.encode():
            key = (key ^ np.uint64(byte)) * np.uint64(1099511628211)
        x = key + np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    steps = (x >> np.uint64(56)).astype(np.int64) - 128
    made = 1.0 + (steps >> 2) / 128.0 if "norm" in name else steps / 512.0
    return made.astype(np.float32).reshape(shape)


# Beneath a layer: Megatron-Core's name, and that of transformers.
WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv_down_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


def gated(name, rows, cols):
    return np.concatenate([values(f"{name}.{part}_proj.weight", (rows // 2, cols)) for part in ("gate", "up")])


def query_groups(name, rows, cols, case):
    """Groups of query heads, their key head and their value head, one group behind the other."""
    heads, groups = case.heads, case.query_groups
    width = rows // (heads + 2 * groups)
    parts = [values(f"{name}.{part}_proj.weight", (n * width, cols)).reshape(groups, -1, cols)
             for part, n in (("q", heads), ("k", groups), ("v", groups))]
    return np.concatenate(parts, 1).reshape(rows, cols)


def legacy_group(name, shape, case, layer):
    """All experts of GroupedMLP in one matrix, each by its own transposed."""
    experts, hidden = case.experts, case.hidden
    if name == "weight1":
        rows = int(np.prod(shape)) // experts // hidden
        parts = [gated(f"{layer}mlp.experts.{e}", rows, hidden).T for e in range(experts)]
    else:
        cols = int(np.prod(shape)) // experts // hidden
        parts = [values(f"{layer}mlp.experts.{e}.down_proj.weight", (hidden, cols)).T for e in range(experts)]
    return np.stack(parts).reshape(shape)


def inside(layer, name, shape, case):
    if name == "self_attention.q_layernorm.weight":
        return values(layer + ("self_attn.q_a_layernorm.weight" if case.mla else "self_attn.q_norm.weight"), shape)
    if name in WHOLE:
        return values(layer + WHOLE[name], shape)
    if name == "self_attention.linear_qkv.weight":
        return query_groups(layer + "self_attn", *shape, case)
    if name == "self_attention.linear_qkv_down_proj.weight":
        ends = ((0, case.query_latent), (case.query_latent, shape[0]))
        return np.concatenate([values(f"{layer}self_attn.{part}.weight", (end - begin, shape[1]))
                               for part, (begin, end) in zip(("q_a_proj", "kv_a_proj_with_mqa"), ends)])
    if name in ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"):
        return gated(layer + name.rsplit(".", 2)[0], *shape)
    if legacy := re.fullmatch(r"mlp\.experts\.(weight[12])", name):
        return legacy_group(legacy[1], shape, case, layer)
    each = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", name)
    if grouped := re.fullmatch(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", name):
        expert, product = grouped[2], grouped[1]
    else:
        expert, product = each[1], each[2]
    if product == "1":
        return gated(f"{layer}mlp.experts.{expert}", *shape)
    return values(f"{layer}mlp.experts.{expert}.down_proj.weight", shape)


def of_parameter(key, shape, case):
    if key in OUTSIDE:
        rows = VOCAB if len(shape) == 2 else shape[0]
        made = values(OUTSIDE[key], (rows, *shape[1:]))
        return np.concatenate([made, np.zeros((shape[0] - rows, *shape[1:]), np.float32)])
    place = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?(.*)", key)
    layer = int(place[2]) + (case.layers if place[1] == "mtp" else 0)
    return inside(f"model.layers.{layer}.", place[3], shape, case)


def fill(torch, model, case):
    state = dict(model.named_parameters()) | {k: v for k, v in model.named_buffers() if k.endswith("expert_bias")}
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(torch.from_numpy(of_parameter(key, tuple(tensor.shape), case)))
