"""Names of weights inside classes of transformers, and those of a Program."""

GRANITE = [("block_sparse_moe.router", "mlp.gate"), ("block_sparse_moe", "mlp"), ("shared_mlp", "mlp.shared_experts")]
BESIDE_TOWERS = [("model.language_model.", "model.")]

NAMES = {
    "AfmoeForCausalLM": [("self_attn.gate_proj", "self_attn.g_proj"), ("mlp.router.gate", "mlp.gate"),
                         ("mlp.expert_bias", "mlp.gate.e_score_correction_bias")],
    "BambaForCausalLM": [("pre_ff_layernorm", "post_attention_layernorm"), ("feed_forward", "mlp"),
                         ("model.final_layernorm", "model.norm")],
    "DbrxForCausalLM": [("transformer.wte", "model.embed_tokens"), ("transformer.norm_f", "model.norm"),
                        ("transformer.blocks", "model.layers"), ("norm_attn_norm.norm_1", "input_layernorm"),
                        ("norm_attn_norm.norm_2", "post_attention_layernorm"), ("norm_attn_norm.attn", "self_attn"),
                        ("self_attn.out_proj", "self_attn.o_proj"), ("ffn.router.layer", "mlp.gate"),
                        ("ffn.experts", "mlp.experts")],
    "Ernie4_5_MoeForCausalLM": [("mlp.gate.moe_statics.", "mlp.gate.")],
    "FlintForCausalLM": [("mlp.shared_expert.", "mlp.shared_experts.")],
    "Gemma3ForCausalLM": [("pre_feedforward_layernorm.", "pre_mlp_layernorm."),
                          ("post_feedforward_layernorm.", "post_mlp_layernorm.")],
    "Gemma4ForCausalLM": [("pre_feedforward_layernorm.", "pre_mlp_layernorm."),
                          ("post_feedforward_layernorm.", "post_mlp_layernorm."), ("router.proj", "mlp.gate"),
                          (".experts.", ".mlp.experts.")],
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSharedForCausalLM": GRANITE,
    "GraniteMoeSWAForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": GRANITE,
    "HunYuanDenseV1ForCausalLM": [("self_attn.query_layernorm", "self_attn.q_norm"),
                                  ("self_attn.key_layernorm", "self_attn.k_norm")],
    "HunYuanMoEV1ForCausalLM": [("mlp.gate.wg", "mlp.gate"), ("mlp.shared_mlp", "mlp.shared_experts"),
                                ("self_attn.query_layernorm", "self_attn.q_norm"),
                                ("self_attn.key_layernorm", "self_attn.k_norm")],
    "PhimoeForCausalLM": [("mlp.router", "mlp.gate")],
    "Glm4vMoeForConditionalGeneration": BESIDE_TOWERS,
    "Qwen3VLMoeForConditionalGeneration": BESIDE_TOWERS,
    "Step3p7ForConditionalGeneration": BESIDE_TOWERS,
    "NemotronHForCausalLM": [("model.embeddings", "model.embed_tokens"), ("model.norm_f", "model.norm")],
    "Llama4ForCausalLM": [("feed_forward.router", "mlp.gate"), ("feed_forward.shared_expert.", "mlp.shared_experts."),
                          ("feed_forward", "mlp")],
}
