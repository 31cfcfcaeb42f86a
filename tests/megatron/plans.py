"""Random plans in words, over the facts of a few models, for holding rules to what megatron-core asserts."""

from mapping import literal

DENSE = {
    "model.experts": "0", "model.shared_experts": "off", "model.shared_gate": "off", "model.mtp": "0", "model.mla": "off",
    "model.sparse_attention": "off", "model.gated_delta": "off", "model.hybrid": "off", "model.compressed": "off",
    "model.router_score": "softmax", "model.attention_bias": "off", "model.expert_bias": "off", "model.bias": "none",
    "model.activation": "silu", "model.gated": "on", "model.probs_on_input": "off",
    "model.normalization": "RMSNorm", "model.norm_eps": "1e-6", "model.qk_norm": "off", "model.window": "0",
    "model.sinks": "off", "model.swiglu_limit": "0", "model.output_gate": "off", "model.latent": "0",
    "model.tied_embeddings": "off", "model.vocab": "128256", "model.vocab_divisor": "128", "model.positions": "rope",
    "model.rope_theta": "500000", "model.rope_scaling": "none", "model.rotary_percent": "1", "model.router_scale": "1",
    "model.router_groups": "1", "model.router_weights": "of chosen", "model.selection_bias": "off", "model.q_lora": "0",
    "model.index_frequency": "1", "model.uniform": "on", "model.parts": "none", "model.partly_rotated": "off",
    "model.indexer_interleaved": "off",
}  # fmt: skip

MODELS = {
    "dense": {**DENSE, "model.layers": "64", "model.hidden": "8192", "model.heads": "64", "model.kv_heads": "8",
              "model.head_dim": "128", "model.ffn": "28672", "model.dense_layers": "64"},
    "mixtral": {**DENSE, "model.layers": "64", "model.hidden": "6144", "model.heads": "48", "model.kv_heads": "8",
                "model.head_dim": "128", "model.ffn": "16384", "model.dense_layers": "0", "model.experts": "8",
                "model.top_k": "2", "model.expert_ffn": "16384"},
    "qwen3": {**DENSE, "model.layers": "96", "model.hidden": "4096", "model.heads": "64", "model.kv_heads": "8",
              "model.head_dim": "128", "model.ffn": "1536", "model.dense_layers": "0", "model.experts": "128",
              "model.top_k": "8", "model.expert_ffn": "1536", "model.qk_norm": "on"},
    "deepseek": {**DENSE, "model.layers": "64", "model.hidden": "7168", "model.heads": "128", "model.ffn": "18432",
                 "model.dense_layers": "3", "model.experts": "256", "model.top_k": "8", "model.expert_ffn": "2048",
                 "model.moe_layers": [0] * 3 + [1] * 61, "model.shared_experts": "on", "model.shared_ffn": "2048",
                 "model.mla": "on", "model.q_lora": "1536", "model.kv_lora": "512", "model.qk_nope_dim": "128",
                 "model.rope_dim": "64", "model.v_dim": "128", "model.router_score": "sigmoid", "model.router_scale": "2.5",
                 "model.router_groups": "8", "model.router_groups_kept": "4", "model.mtp": "1"},
    "gpt-oss": {**DENSE, "model.layers": "32", "model.hidden": "2880", "model.heads": "64", "model.kv_heads": "8",
                "model.head_dim": "64", "model.ffn": "2880", "model.dense_layers": "0", "model.experts": "128",
                "model.top_k": "4", "model.expert_ffn": "2880", "model.activation": "quick_gelu", "model.bias": "all",
                "model.attention_bias": "on", "model.expert_bias": "on"},
    "gated-delta": {**DENSE, "model.layers": "64", "model.hidden": "2048", "model.heads": "16", "model.kv_heads": "8",
                    "model.head_dim": "256", "model.ffn": "5120", "model.dense_layers": "0", "model.experts": "512",
                    "model.top_k": "10", "model.expert_ffn": "512", "model.shared_experts": "on", "model.shared_ffn": "512",
                    "model.shared_gate": "on", "model.gated_delta": "on", "model.linear_layers": [1, 1, 1, 0] * 16,
                    "model.conv_kernel": "4", "model.key_dim": "128", "model.value_dim": "128", "model.key_heads": "16",
                    "model.value_heads": "32"},
}  # fmt: skip
MODELS["deepseek-2-mtp"] = {**MODELS["deepseek"], "model.mtp": "2"}
MODELS["sparse"] = {
    **MODELS["deepseek"], "model.sparse_attention": "on", "model.indexer_heads": "64", "model.indexer_dim": "128",
    "model.indexer_top_k": "2048",
}  # fmt: skip

# The words of a plan in which every choice is off.
PLAIN = {
    "seq": "4096", "gbs": "4096", "mbs": "1", "tp": "1", "cp": "1", "pp": "1", "vpp": "1", "dp": "64", "ep": "1", "etp": "1",
    "layout": "none", "schedule": "1f1b", "rank_order": "tp-cp-ep-dp-pp", "precision": "bf16",
    "attention_precision": "default", "expert_precision": "default", "head_precision": "default", "bf16_layers": "none",
    "fp8_scaling": "current", "fp8_wgrad": "off", "gradients": "fp32", "recompute": "none", "offload": "none",
    "optimizer": "adamw", "lora": "none", "fsdp": "off", "fsdp_replicas": "1", "dispatcher": "alltoall", "cp_comm": "ring", "capacity": "none", "paged_stash": "off",
    "memory_efficient_permutation": "on", "tp_overlap": "off", "ep_overlap": "off", "delay_wgrad": "off",
    "cuda_graph": "none", "deterministic": "off", "documents": "ignore", "lengths": "none", "routing": "balanced", "balance": "natural",
    "load_balancing": "seq_aux_loss", "aux_loss": "none", "z_loss": "none", "input_jitter": "none", "bias_update": "none", "indexer_loss": "1", "indexer_stage": "sparse",
    "expert_capacity": "none", "drop_policy": "probs", "drop_scope": "sub_sequence", "pad_to_capacity": "off", "hardware": "gb200-nvl72",
    "hardware.generation": "blackwell", "micro_batches": "64",
}  # fmt: skip

# Facts of the machines that plans name: GPUs that reach each other over NVLink, compute capability.
MACHINES = {
    "h100": ("hopper", "8", "9"), "h200": ("hopper", "8", "9"), "b200": ("blackwell", "8", "10"),
    "gb200-nvl72": ("blackwell", "72", "10"), "gb300-nvl72": ("blackwell", "72", "10.3"),
}  # fmt: skip


def derived(plan):
    """The facts that follow from other words."""
    integer = lambda field: int(literal(plan[field]))
    generation, domain, capability = MACHINES[plan["hardware"]]
    plan["hardware.generation"], plan["hardware.nvlink_domain"] = generation, domain
    plan["hardware.compute_capability"] = capability
    plan["derived.expert_ranks"] = str(integer("ep") * integer("etp"))
    asked = plan["derived.expert_ranks"] != "1" or (plan["capacity"] != "none" and plan["dispatcher"] == "hybridep")
    plan["derived.dispatcher"] = plan["dispatcher"] if asked else "alltoall"
    first, last = (0, 0) if plan["bf16_layers"] == "none" else map(int, plan["bf16_layers"].split("+"))
    fit = max(first, last) <= integer("model.layers") // integer("pp")
    plan["derived.bf16_layers_fit"] = "on" if fit else "off"
    same = plan["expert_precision"] in ("default", plan["precision"])
    plan["derived.expert_precision_is_precision"] = "on" if same else "off"
    keys = integer("model.kv_heads") if "model.kv_heads" in plan else integer("tp")
    plan["derived.key_replicas"] = str(max(1, integer("tp") // keys))
    split = integer("tp") * integer("cp")
    heads = [integer(f) for f in ("model.key_heads", "model.value_heads") if f in plan]
    plan["derived.linear_heads_fit"] = "off" if any(h % split for h in heads) else "on"
    return plan


def joined(random, words, most):
    return "+".join(sorted(random.sample(words, random.randint(1, most)), key=words.index))


def choose(random, plan, model):
    """Changes of a plain plan; each choice is left alone more often than not, so that legal plans are common."""
    experts, changed = model["model.experts"] != "0", {}
    share = random.choice([0.4, 0.7, 1.0])

    def sometimes(probability, field, choices):
        if random.random() < probability * share:
            changed[field] = choices() if callable(choices) else random.choice(choices)

    sometimes(0.3, "tp", ["2", "4", "8"])
    sometimes(0.6, "pp", ["2", "4", "8"])
    sometimes(0.25, "cp", ["2", "4", "8"])
    if changed.get("pp", "1") != "1" and random.random() < 0.6:
        changed.update(vpp=random.choice(["2", "4"]), schedule="interleaved")
    sometimes(0.5, "precision", ["fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4", "fp32"])
    if changed.get("precision") == "fp8-tensor":
        sometimes(0.6, "fp8_scaling", ["delayed"])
    if changed.get("precision", "bf16") not in ("bf16", "fp32", "nvfp4"):
        sometimes(0.3, "bf16_layers", ["1+1", "2+2", "0+3", "16+1", "1+40"])
    sometimes(0.1, "head_precision", ["mxfp8"])
    modules = (
        ["layernorm", "core_attn", "moe_act", "mlp", "shared_experts", "moe"]
        if experts
        else ["layernorm", "core_attn", "mlp"]
    )
    if model["model.mla"] == "on" or random.random() < 0.05:
        modules.append("mla_up_proj")
    if not (model["model.shared_experts"] == "on"):
        modules = [module for module in modules if module != "shared_experts"]
    sometimes(0.5, "recompute", lambda: "full" if random.random() < 0.2 else joined(random, modules, 2))
    offload = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"] + (
        ["expert_fc1", "moe_act"] if experts else []
    )
    sometimes(0.3, "offload", lambda: joined(random, offload, 2))
    sometimes(0.15, "offload", lambda: "core_attn+attn_proj")
    sometimes(0.3, "optimizer", ["adamw+bf16_moments"])
    sometimes(0.2, "fsdp", ["on"])
    graphs = ["attn", "mlp", "moe_router", "moe_preprocess", "shared_experts"]
    sometimes(0.5, "cuda_graph", lambda: random.choice(["full", "partial", "partial", joined(random, graphs, 3)]))
    if changed.get("cuda_graph") == "shared_experts":
        changed["cuda_graph"] = "attn+shared_experts"
    sometimes(0.1, "deterministic", ["on"])
    if random.random() < 0.3:
        changed.update({"hardware": "h100", "hardware.generation": "hopper"})
    if not experts:
        return changed
    sometimes(0.7, "ep", ["2", "4", "8"])
    sometimes(0.15, "etp", ["2"])
    sometimes(0.6, "dispatcher", ["allgather", "deepep", "hybridep", "hybridep"])
    sometimes(0.35, "ep_overlap", ["on"])
    sometimes(0.35 if "ep_overlap" in changed else 0.05, "delay_wgrad", ["on"])
    sometimes(0.25, "capacity", ["1.5", "1.2"])
    sometimes(0.4 if "capacity" in changed else 0.05, "paged_stash", ["on"])
    sometimes(0.2, "expert_capacity", ["1", "1.25"])
    sometimes(0.4 if "expert_capacity" in changed else 0.03, "pad_to_capacity", ["on"])
    sometimes(0.3, "aux_loss", ["0.0001", "0.01"])
    sometimes(0.3, "load_balancing", ["aux_loss", "global_aux_loss"])
    sometimes(0.15, "bias_update", ["0.001"])
    sometimes(0.2, "balance", ["forced"])
    return changed


def plan_of(name, changed):
    return derived({**PLAIN, **MODELS[name], **changed})


def random_plan(random):
    """A model's name and the words in which a plan of it differs from the plain one."""
    name = random.choice(sorted(MODELS))
    return name, choose(random, PLAIN, MODELS[name])
