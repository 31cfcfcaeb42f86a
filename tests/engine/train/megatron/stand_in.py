"""Modules by torch alone in place of Transformer Engine's, which needs a GPU: Megatron-Core's own classes around them then
write their parameters by the names and shards that they have with it. Products are of one rank."""
import contextlib
import sys
import types

import torch
from torch.nn import Parameter


def filled(sizes, options, start=0.0):
    return Parameter(torch.full(sizes, start, dtype=options.get("params_dtype", torch.float32)))


def normalized(x, weight, eps):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype) * weight


class Base(torch.nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class Linear(Base):
    def __init__(self, in_features, out_features, bias=True, return_bias=False, parallel_mode=None, tp_size=1, **options):
        super().__init__()
        assert not bias
        self.parallel_mode, self.tp_size, self.in_features, self.out_features = parallel_mode, tp_size, in_features, out_features
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        self.weight = filled((rows, in_features // (tp_size if parallel_mode == "row" else 1)), options)

    def forward(self, x, is_first_microbatch=None):
        return torch.nn.functional.linear(x, self.weight)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, eps=1e-5, normalization="RMSNorm", **options):
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        self.eps = eps
        self.layer_norm_weight = filled((in_features,), options, 1.0)

    def forward(self, x, is_first_microbatch=None):
        return super().forward(normalized(x, self.layer_norm_weight, self.eps))


class GroupedLinear(Base):
    def __init__(self, num_gemms, in_features, out_features, bias=True, parallel_mode=None, tp_size=1, **options):
        super().__init__()
        assert not bias and tp_size == 1
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", filled((out_features, in_features), options))

    def init_fp8_metadata(self, num_gemms):
        pass

    def forward(self, x, m_splits, is_first_microbatch=None):
        parts = x.split([int(rows) for rows in m_splits])
        return torch.cat([part @ getattr(self, f"weight{i}").T for i, part in enumerate(parts)])


class RMSNorm(Base):
    def __init__(self, normalized_shape=0, hidden_size=0, eps=1e-5, **options):
        super().__init__()
        self.eps, self.weight = eps, filled((normalized_shape or hidden_size,), options, 1.0)

    def forward(self, x):
        return normalized(x, self.weight, self.eps)


def causal(query, key, value, scale):
    """Of tensors [sequence, batch, heads, width]."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(2)


class DotProductAttention(Base):
    def __init__(self, num_attention_heads, kv_channels, softmax_scale=None, **options):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, **options):
        return causal(query, key, value, self.scale)


class CoreAttention(torch.nn.Module):
    """As a configuration of Megatron-Core asks for it."""

    def __init__(self, config, softmax_scale=None, **options):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, **options):
        return causal(query, key, value, self.scale)


class CudaRNGStatesTracker:
    pass


def install(version):
    """As the package of a release that has grouped products and little else: what a later one has Megatron-Core does without."""
    names = {}

    def module(name, **members):
        names[name] = types.ModuleType(name)
        names[name].__dict__.update(members, __path__=[])
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(names[parent], leaf, names[name])

    module("transformer_engine", __version__=version)
    module("transformer_engine.common")
    module("transformer_engine.common.recipe", DelayedScaling=type("DelayedScaling", (), {}), Format=None)
    module("transformer_engine.pytorch", Linear=Linear, LayerNormLinear=LayerNormLinear, GroupedLinear=GroupedLinear,
           RMSNorm=RMSNorm, LayerNorm=None, DotProductAttention=DotProductAttention)
    never = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=never, fp8_autocast=contextlib.nullcontext,
           fp8_model_init=contextlib.nullcontext)
    module("transformer_engine.pytorch.distributed", CudaRNGStatesTracker=CudaRNGStatesTracker,
           __getattr__=lambda name: None)  # what only a recomputation calls
    module("transformer_engine.pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (), {}))
    module("transformer_engine.pytorch.cpp_extensions", cast_to_fp8=None)
    sys.modules.update(names)
