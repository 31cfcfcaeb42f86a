"""The classes of transformers that compare.py holds ours to: fields of a tiny config of each, and a plan that splits it."""

VOCAB = 199

COMMON = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=8, intermediate_size=96,
              initializer_range=0.08, max_position_embeddings=256, attention_dropout=0.0, tie_word_embeddings=False,
              pad_token_id=None, bos_token_id=None, eos_token_id=None)
ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
DEEPSEEK = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2,
                num_key_value_heads=8, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                first_k_dense_replace=1)
YARN = dict(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                             "original_max_position_embeddings": 32})

# With few heads of an indexer many scores would be 0, of which torch's topk takes any.
SPARSE = dict(index_n_heads=20, index_head_dim=12, index_topk=7, q_lora_rank=32)

EXPERTS_OF_GPT_OSS = dict(num_key_value_heads=4, head_dim=16, num_local_experts=8, num_experts_per_tok=3,
                          sliding_window=12, swiglu_limit=0.4)

LAGUNA = dict(num_key_value_heads=4, head_dim=16, num_attention_heads_per_layer=[8, 16, 8],
              shared_expert_intermediate_size=48, moe_routed_scaling_factor=1.5, sliding_window=12,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"],
              mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={
                  "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
                                     "original_max_position_embeddings": 32},
                  "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}})

DELTA = dict(num_key_value_heads=4, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=8,
             linear_key_head_dim=12, linear_value_head_dim=16, linear_conv_kernel_dim=4,
             layer_types=["linear_attention", "full_attention", "linear_attention"],
             rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5})

# Classes of transformers 5.24 cut steps at time_step_min, ours at time_step_limit: here both are the same.
MAMBA = dict(num_key_value_heads=4, head_dim=16, mamba_num_heads=8, mamba_head_dim=12, ssm_state_size=20, n_groups=4,
             conv_kernel=4, chunk_size=16, time_step_min=0.45, time_step_limit=[0.45, float("inf")], n_routed_experts=8,
             num_experts_per_tok=3, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48, n_group=2,
             topk_group=1, routed_scaling_factor=2.5, layer_norm_epsilon=1e-5)

HYBRID = dict(num_key_value_heads=4, mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=20, mamba_d_conv=4,
              mamba_chunk_size=16, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6,
              logits_scaling=1.7, shared_intermediate_size=48,
              layer_types=["linear_attention", "full_attention", "linear_attention"])

GEMMA = dict(num_key_value_heads=4, head_dim=16, global_head_dim=24, num_global_key_value_heads=2, attention_k_eq_v=True,
             hidden_size_per_layer_input=0, sliding_window=12, final_logit_softcapping=2.0,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"])

VISION = dict(hidden_size=32, depth=1, num_heads=2, intermediate_size=32, out_hidden_size=64)

SPLIT = ["gpus=8", "tp=2", "ep=4", "mbs=2"]
STAGES = ["gpus=8", "tp=2", "pp=2", "ep=2", "etp=2", "mbs=2"]
DENSE_SPLIT = ["gpus=4", "tp=2", "mbs=1"]

# name: (class, configuration, fields of the second plan)
CASES = {
    "llama": ("LlamaForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, rms_norm_eps=1e-5), DENSE_SPLIT),
    "llama-llama3": ("LlamaForCausalLM", dict(COMMON, num_key_value_heads=4, head_dim=16, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}), DENSE_SPLIT),
    "qwen3-yarn": ("Qwen3ForCausalLM", dict(COMMON, num_key_value_heads=4, head_dim=16, rope_parameters={
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}), DENSE_SPLIT),
    "llama-linear": ("LlamaForCausalLM", dict(COMMON, num_key_value_heads=4, rope_parameters={
        "rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}), DENSE_SPLIT),
    "llama-tied": ("LlamaForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=2, head_dim=16,
                                            tie_word_embeddings=True), DENSE_SPLIT),
    "qwen2": ("Qwen2ForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4), DENSE_SPLIT),
    "qwen3": ("Qwen3ForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, head_dim=16), DENSE_SPLIT),
    "mixtral": ("MixtralForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                           num_experts_per_tok=2), SPLIT),
    "mixtral-window": ("MixtralForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                                  num_experts_per_tok=2, sliding_window=10), STAGES),
    "qwen2-window": ("Qwen2ForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, use_sliding_window=True,
                                              sliding_window=12, max_window_layers=1), DENSE_SPLIT),
    "llama-bias": ("LlamaForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
                   DENSE_SPLIT),
    "gpt-oss": ("GptOssForCausalLM", dict(COMMON, **EXPERTS_OF_GPT_OSS, rope_parameters={
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 32}), SPLIT),
    "gpt-oss-stages": ("GptOssForCausalLM", dict(COMMON, **EXPERTS_OF_GPT_OSS, **ROPE),
                       ["gpus=8", "tp=2", "pp=2", "ep=2", "mbs=2"]),
    "qwen2-moe": ("Qwen2MoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=8, decoder_sparse_step=2,
                                              shared_expert_intermediate_size=48, norm_topk_prob=False), SPLIT),
    "qwen2-moe-normalised": ("Qwen2MoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4,
                                                         shared_expert_intermediate_size=64, norm_topk_prob=True,
                                                         mlp_only_layers=[1]), SPLIT),
    "qwen3-moe": ("Qwen3MoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=16,
                                              norm_topk_prob=True), SPLIT),
    "qwen3-moe-plain": ("Qwen3MoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=8,
                                                    norm_topk_prob=False), SPLIT),
    "glm4-moe": ("Glm4MoeForCausalLM", dict(COMMON, num_key_value_heads=4, head_dim=16, n_routed_experts=8,
                                            num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
                                            first_k_dense_replace=1, use_qk_norm=True, num_nextn_predict_layers=0, attention_bias=True,
                                            routed_scaling_factor=1.7, norm_topk_prob=True, n_group=1, topk_group=1,
                                            rope_parameters={"rope_type": "default", "rope_theta": 500.0,
                                                             "partial_rotary_factor": 0.5}), SPLIT),
    "deepseek2-greedy": ("DeepseekV2ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=None,
                                                       topk_method="greedy", norm_topk_prob=False,
                                                       routed_scaling_factor=1.0, rms_norm_eps=1e-3), STAGES),
    "deepseek2-groups": ("DeepseekV2ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=32, n_group=4,
                                                       topk_group=2, topk_method="group_limited_greedy",
                                                       routed_scaling_factor=16.0), SPLIT),
    "deepseek2-yarn": ("DeepseekV2ForCausalLM", dict(COMMON, **YARN, **DEEPSEEK, q_lora_rank=32,
                                                     topk_method="greedy"), SPLIT),
    "deepseek3": ("DeepseekV3ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=32, n_group=4, topk_group=2,
                                                routed_scaling_factor=2.5, norm_topk_prob=True, rms_norm_eps=1e-3,
                                                num_nextn_predict_layers=0),
                  SPLIT),
    "deepseek3-half-split": ("DeepseekV3ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=None, n_group=2,
                                                           topk_group=1, norm_topk_prob=False, rope_interleave=False,
                                                           num_nextn_predict_layers=0),
                             SPLIT),
    "deepseek3-yarn": ("DeepseekV3ForCausalLM", dict(COMMON, **YARN, **DEEPSEEK, q_lora_rank=32, n_group=4,
                                                     topk_group=2, num_nextn_predict_layers=0), STAGES),
    "deepseek3-mtp": ("DeepseekV3ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=32, n_group=4, topk_group=2,
                                                    routed_scaling_factor=2.5, num_nextn_predict_layers=1), SPLIT),
    "deepseek3.2": ("DeepseekV32ForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, **SPARSE, n_group=4, topk_group=2,
                                                   rms_norm_eps=1e-3), SPLIT),
    "deepseek3.2-yarn": ("DeepseekV32ForCausalLM", dict(COMMON, **YARN, **DEEPSEEK, **SPARSE, n_group=4, topk_group=2),
                         ["gpus=8", "tp=2", "cp=4", "ep=2"]),
    "glm5": ("GlmMoeDsaForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, **SPARSE, n_group=1, topk_group=1),
             ["gpus=8", "tp=2", "pp=2", "ep=2", "etp=2", "mbs=2"]),
    "glm5.2": ("GlmMoeDsaForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, **SPARSE, n_group=1, topk_group=1,
                                            indexer_types=["full", "shared", "full"]), ["gpus=4", "cp=2", "ep=2"]),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", dict(COMMON, **ROPE, **DEEPSEEK, q_lora_rank=32, n_group=1, topk_group=1,
                                                     routed_scaling_factor=1.8, num_nextn_predict_layers=0,
                                                     mlp_layer_types=["dense", "sparse", "sparse"]), SPLIT),
    "hunyuan": ("HunYuanMoEV1ForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, head_dim=16, num_experts=8,
                                                moe_topk=3, num_shared_expert=1), SPLIT),
    "hy3": ("HYV3ForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=16, num_shared_experts=1,
                                    router_scaling_factor=1.6, first_k_dense_replace=1), SPLIT),
    "ernie": ("Ernie4_5_MoeForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, moe_num_experts=8, moe_k=3,
                                              moe_intermediate_size=32, moe_num_shared_experts=2, use_bias=False,
                                              moe_layer_start_index=1), SPLIT),
    "exaone-moe": ("ExaoneMoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=16, n_group=2,
                                                topk_group=1, num_shared_experts=1, sliding_window=12, layer_types=[
                                                    "sliding_attention", "full_attention", "sliding_attention"],
                                                mlp_layer_types=["dense", "sparse", "sparse"],
                                                num_nextn_predict_layers=0, routed_scaling_factor=2.5), STAGES),
    "olmoe": ("OlmoeForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_experts=8, num_experts_per_tok=3,
                                       clip_qkv=0.6), SPLIT),
    "minimax-m2": ("MiniMaxM2ForCausalLM", dict(COMMON, num_key_value_heads=4, head_dim=16, num_local_experts=8,
                                                num_experts_per_tok=3, rope_parameters={
                                                    "rope_type": "default", "rope_theta": 500.0,
                                                    "partial_rotary_factor": 0.5}), SPLIT),
    "granite-moe": ("GraniteMoeForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                                  num_experts_per_tok=3, embedding_multiplier=3.0,
                                                  attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=1.7),
                    STAGES),
    "granite-shared": ("GraniteMoeSharedForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                                           num_experts_per_tok=3, embedding_multiplier=3.0,
                                                           attention_multiplier=0.2, residual_multiplier=0.6,
                                                           logits_scaling=1.7, shared_intermediate_size=48), SPLIT),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", dict(COMMON, **HYBRID, num_local_experts=8, num_experts_per_tok=3,
                                                           time_step_limit=[0.45, 0.9]), STAGES),
    "granite-hybrid-context": ("GraniteMoeHybridForCausalLM", dict(COMMON, **HYBRID, **ROPE, num_local_experts=0,
                                                                   num_experts_per_tok=0,
                                                                   position_embedding_type="rope"),
                               ["gpus=8", "tp=2", "cp=2", "mbs=2"]),
    "granite-swa": ("GraniteMoeSWAForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                                     num_experts_per_tok=3, embedding_multiplier=3.0,
                                                     attention_multiplier=0.2, residual_multiplier=0.6,
                                                     logits_scaling=1.7, shared_intermediate_size=48, sliding_window=12,
                                                     layer_types=["full_attention", "sliding_attention",
                                                                  "sliding_attention"],
                                                     layer_rope_theta=[0, 500.0, 900.0]), SPLIT),
    "mellum": ("MellumForCausalLM", dict(COMMON, **EXPERTS, num_mtp_layers=0, num_key_value_heads=4, head_dim=16,
                                         sliding_window=12, norm_topk_prob=True, layer_types=["sliding_attention", "full_attention",
                                                                           "sliding_attention"],
                                         mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={
                                             "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
                                                                "original_max_position_embeddings": 32},
                                             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}), STAGES),
    "flint": ("FlintForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=16, sliding_window=12,
                                       shared_expert_intermediate_size=48, mlp_only_layers=[0], layer_types=[
                                           "full_attention", "sliding_attention", "full_attention"]), SPLIT),
    "solar-open": ("SolarOpenForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, head_dim=16, n_routed_experts=8,
                                                num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
                                                n_group=1, topk_group=1), SPLIT),
    "dots1": ("Dots1ForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, head_dim=16, n_routed_experts=8,
                                       num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, n_group=1,
                                       topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
                                       routed_scaling_factor=2.5), STAGES),
    "gemma4-moe": ("Gemma4ForCausalLM", dict(COMMON, **GEMMA, enable_moe_block=True, num_experts=8, top_k_experts=3,
                                             moe_intermediate_size=32), SPLIT),
    "gemma4-tied": ("Gemma4ForCausalLM", dict({**COMMON, "tie_word_embeddings": True}, **GEMMA),
                    ["gpus=4", "tp=2", "cp=2", "mbs=2"]),
    "step3.7": ("Step3p7ForConditionalGeneration", dict(
        text_config=dict({**COMMON, "pad_token_id": 0}, num_key_value_heads=4, head_dim=16,
                         num_sliding_attention_heads=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, share_expert_dim=48, sliding_window=12,
                         moe_router_scaling_factor=1.5, swiglu_limits=[0.0, 0.025, 0.0],
                         swiglu_limits_shared=[0.03, 0.0, 0.02],
                         layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                         mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={
                             "full_attention": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0,
                                                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0,
                                                   "partial_rotary_factor": 1.0}}),
        vision_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)), SPLIT),
    "glm4v-moe": ("Glm4vMoeForConditionalGeneration", dict(
        text_config=dict(COMMON, num_key_value_heads=4, head_dim=16, n_routed_experts=8, num_experts_per_tok=3,
                         moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True,
                         routed_scaling_factor=1.7, n_group=1, topk_group=1, rope_parameters={
                             "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [1, 1, 2]}),
        vision_config=dict(VISION, hidden_size=64)), SPLIT),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", dict(
        text_config=dict(COMMON, **EXPERTS, num_key_value_heads=4, head_dim=16, rope_parameters={
            "rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}), vision_config=VISION), SPLIT),
    "phi-moe": ("PhimoeForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, num_local_experts=8,
                                          num_experts_per_tok=2, router_jitter_noise=0.4, attention_bias=True,
                                          lm_head_bias=True), SPLIT),
    "ernie-bias": ("Ernie4_5_MoeForCausalLM", dict(COMMON, **ROPE, num_key_value_heads=4, moe_num_experts=8, moe_k=3,
                                                   moe_intermediate_size=32, moe_num_shared_experts=2, use_bias=True,
                                                   moe_layer_start_index=1), STAGES),
    "nemotron": ("NemotronForCausalLM", dict(COMMON, num_key_value_heads=4, hidden_act="relu2", norm_eps=1e-5,
                                             rope_parameters={"rope_type": "default", "rope_theta": 500.0,
                                                              "partial_rotary_factor": 0.5}), DENSE_SPLIT),
    "dbrx": ("DbrxForCausalLM", dict(**ROPE, d_model=64, n_heads=8, n_layers=3, max_seq_len=256, vocab_size=VOCAB,
                                     initializer_range=0.08, attn_config=dict(clip_qkv=0.6, kv_n_heads=4,
                                                                              rope_theta=500.0),
                                     ffn_config=dict(ffn_hidden_size=32, moe_num_experts=8, moe_top_k=3,
                                                     moe_jitter_eps=None, hidden_size=64),
                                     tie_word_embeddings=False, pad_token_id=None, bos_token_id=None,
                                     eos_token_id=None), SPLIT),
    "afmoe": ("AfmoeForCausalLM", dict(COMMON, **ROPE, **EXPERTS, num_key_value_heads=4, head_dim=16, num_dense_layers=1,
                                       num_shared_experts=1, route_scale=1.5, sliding_window=12, mup_enabled=True,
                                       layer_types=["sliding_attention", "full_attention", "sliding_attention"]), SPLIT),
    "laguna": ("LagunaForCausalLM", dict(COMMON, **EXPERTS, **LAGUNA, gating=True), SPLIT),
    "laguna-columns": ("LagunaForCausalLM", dict(COMMON, **EXPERTS, **LAGUNA, gating="per-element"), STAGES),
    "mimo-v2": ("MiMoV2FlashForCausalLM", dict(COMMON, num_key_value_heads=2, head_dim=16, v_head_dim=12,
                                               n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
                                               sliding_window=12, attention_value_scale=0.7, layer_types=[
                                                   "full_attention", "sliding_attention", "sliding_attention"],
                                               mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={
                                                   "full_attention": {"rope_type": "default", "rope_theta": 5000.0,
                                                                      "partial_rotary_factor": 0.5},
                                                   "sliding_attention": {"rope_type": "default", "rope_theta": 500.0,
                                                                         "partial_rotary_factor": 0.5}}), SPLIT),
    "mistral4": ("Mistral4ForCausalLM", dict(COMMON, **{k: v for k, v in DEEPSEEK.items()}, q_lora_rank=32, n_group=1,
                                             topk_group=1, head_dim=24, rope_parameters=dict(
                                                 YARN["rope_parameters"], llama_4_scaling_beta=0.3,
                                                 original_max_position_embeddings=10)), SPLIT),
    "qwen3-next": ("Qwen3NextForCausalLM", dict(COMMON, **EXPERTS, **DELTA, shared_expert_intermediate_size=48), SPLIT),
    "qwen3-next-context": ("Qwen3NextForCausalLM", dict(COMMON, **EXPERTS, **DELTA, shared_expert_intermediate_size=48),
                           ["gpus=8", "tp=2", "cp=2", "pp=2", "mbs=2"]),
    "qwen3.5": ("Qwen3_5ForCausalLM", dict(COMMON, **DELTA), DENSE_SPLIT),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", dict(COMMON, **EXPERTS, **DELTA, shared_expert_intermediate_size=48), SPLIT),
    "nemotron-h": ("NemotronHForCausalLM", dict({k: v for k, v in COMMON.items() if k != "num_hidden_layers"}, **MAMBA,
                                                hybrid_override_pattern="M-M*-M"), ["gpus=8", "tp=2", "cp=2", "mbs=2"]),
    "nemotron-3": ("NemotronHForCausalLM", dict({k: v for k, v in COMMON.items() if k != "num_hidden_layers"}, **MAMBA,
                                                hybrid_override_pattern="MEM*E"), SPLIT),
    "nemotron-3-latent": ("NemotronHForCausalLM", dict({k: v for k, v in COMMON.items() if k != "num_hidden_layers"},
                                                       **MAMBA, hybrid_override_pattern="ME*EM", moe_latent_size=40),
                          ["gpus=8", "tp=2", "pp=2", "ep=4", "mbs=2"]),
    "llama4": ("Llama4ForCausalLM", dict(COMMON, num_key_value_heads=4, head_dim=16, num_local_experts=8,
                                         num_experts_per_tok=1, intermediate_size_mlp=96, interleave_moe_layer_step=1,
                                         use_qk_norm=True, attention_chunk_size=12, attn_temperature_tuning=True,
                                         floor_scale=10, attn_scale=0.3, no_rope_layers=[1, 0, 1], rope_parameters={
                                             "rope_type": "default", "rope_theta": 500.0}), SPLIT),
}
