"""Which models Megatron-Core writes, in which form, by which ranks."""
from dataclasses import dataclass, field


@dataclass
class Split:
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    spread: bool = False  # data-parallel ranks save a share each: fully_parallel_save


@dataclass
class Case:
    model: str  # of samples.cpp
    split: Split = field(default_factory=Split)
    transformer_engine: bool = False  # names of its modules: norms lie in the products behind them
    groups: bool = False              # TEGroupedMLP in place of SequentialMLP
    legacy_groups: bool = False       # GroupedMLP
    singletons: bool = False          # a tensor for each expert, and for each half of gated ones
    fused_down: bool = False          # one product makes latents of queries and of keys and values
    bf16: bool = False
    mtp: int = 0
    releases: tuple = ((0, 16), (0, 99))  # of megatron-core that write it

    hidden, heads, query_groups, layers, experts, query_latent = 32, 8, 4, 2, 4, 24

    @property
    def mla(self):
        return self.model.startswith("deepseek")

    def metadata(self):
        return {"singleton_local_shards": True} if self.singletons else {}

    def changed(self):
        """Fields of the configuration in samples.cpp that are others here."""
        if not self.mla:
            return {"num_hidden_layers": self.layers, "num_experts": self.experts}
        fields = {"num_hidden_layers": self.layers, "n_routed_experts": self.experts, "topk_group": 1}
        if self.model == "deepseek2":
            return fields | {"n_group": 1, "topk_method": "greedy"}
        return fields | {"n_group": 2, "num_nextn_predict_layers": self.mtp}

    def options(self):
        """Of the configuration class."""
        common = dict(num_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads, ffn_hidden_size=64,
                      num_moe_experts=self.experts, moe_router_topk=2, moe_ffn_hidden_size=16, qk_layernorm=True)
        if not self.mla:
            return common | dict(num_query_groups=self.query_groups, kv_channels=8)
        common |= dict(moe_layer_freq=[0, 1], rope_type="rope", rotary_base=10000, kv_lora_rank=16, qk_head_dim=8,
                       qk_pos_emb_head_dim=4, v_head_dim=8, moe_router_dtype="fp32",
                       mtp_num_layers=self.mtp or None)
        if self.model == "deepseek2":
            return common | dict(q_lora_rank=None, moe_shared_expert_intermediate_size=32, moe_router_pre_softmax=True,
                                 moe_router_score_function="softmax")
        if self.fused_down:
            common["mla_down_proj_fusion"] = True
        return common | dict(q_lora_rank=self.query_latent, moe_shared_expert_intermediate_size=16, moe_router_score_function="sigmoid",
                             moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5,
                             moe_router_num_groups=2, moe_router_group_topk=1)


# GroupedMLP is gone behind 0.16. Without latents of queries 0.19 norms their input twice, which is another model.
TO_16, TO_18, FROM_19 = ((0, 16), (0, 16)), ((0, 16), (0, 18)), ((0, 19), (0, 99))

CASES = {
    "qwen3": Case("qwen3"),
    "qwen3-engine": Case("qwen3", Split(2, tp=2), transformer_engine=True, groups=True),
    "qwen3-legacy": Case("qwen3", Split(4, ep=2, tp=2, etp=2), legacy_groups=True, releases=TO_16),
    "qwen3-stages": Case("qwen3", Split(2, pp=2), bf16=True),
    "v2": Case("deepseek2", Split(4, ep=2, spread=True), transformer_engine=True, singletons=True, releases=TO_18),
    "v2-split": Case("deepseek2", Split(4, tp=2, pp=2), transformer_engine=True, groups=True, releases=TO_18),
    "v3": Case("deepseek3", Split(4, tp=2, pp=2, ep=2), transformer_engine=True, groups=True, bf16=True, mtp=1),
    "v3-local": Case("deepseek3", mtp=1, releases=FROM_19),
    "v3-fused": Case("deepseek3", Split(2, tp=2), transformer_engine=True, fused_down=True, mtp=1, releases=FROM_19),
    "v3-spread": Case("deepseek3", Split(4, tp=2, ep=2, spread=True), transformer_engine=True, groups=True, mtp=2),
}
