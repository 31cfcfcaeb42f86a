#!/usr/bin/env python3
"""Configs of every causal language model that transformers knows, as it saves them, with exact counts of parameters.

Usage: configs.py write FILE: makes the table again; configs.py check FILE: fails where the installed transformers saves other
configs or counts than the table has for families that both know. Exit status 77 where the package is not installed.
A row is {"model_type", "architecture", "sizes": "default" or "small", "parameters", "config"}. Counts are of the model on the
meta device, shared tensors once; null where the class cannot be built from its own defaults. Families that the planner does
not read keep a config of two fields.
"""
import json
import pathlib
import re
import sys
import tempfile
import warnings

try:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError:
    print("skipped: needs the packages torch and transformers")
    sys.exit(77)

# No two sizes are alike or a usual default, so that a size which is read from elsewhere shows in the count.
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 40,
    "intermediate_size": 416, "moe_intermediate_size": 88, "shared_expert_intermediate_size": 104, "vocab_size": 1531,
    "num_experts": 24, "num_local_experts": 24, "n_routed_experts": 24, "moe_num_experts": 24, "num_experts_per_tok": 3,
    "moe_k": 3, "moe_topk": 3, "moe_top_k": 3, "n_group": 2, "topk_group": 1, "num_expert_group": 2, "q_lora_rank": 72, "kv_lora_rank": 56,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 28, "first_k_dense_replace": 1, "n_shared_experts": 2,
    "num_shared_experts": 2, "moe_num_shared_experts": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 20,
    "linear_value_head_dim": 36, "mamba_num_heads": 6, "mamba_head_dim": 44, "n_groups": 3, "ssm_state_size": 52,
    "index_n_heads": 5, "index_head_dim": 32, "index_topk": 128, "shared_intermediate_size": 136, "intermediate_size_mlp": 152,
    "num_nextn_predict_layers": 0, "hidden_size_per_layer_input": 0, "moe_shared_expert_intermediate_size": 120, "moe_latent_size": 112,
    "o_groups": 4, "o_lora_rank": 60, "rotary_dim": 20,
}

HERE = pathlib.Path(__file__).resolve()
FAMILIES = (HERE.parents[4] / "planner/model/families/families.cpp").read_text(encoding="utf-8")
READ = set(re.findall(r'Family\{"([^"]*)"', FAMILIES))


def build(config_class, sizes):
    """A config with those of the sizes that it has and takes, or None."""
    default = config_class()
    text = default.get_text_config()
    known = {key: value for key, value in sizes.items() if stated(text, key) or key == "num_experts_per_tok"}
    if default.model_type == "deepseek_v4":  # whose class does not read it
        known.pop("n_shared_experts")
    inner = None if text is default else next(key for key, value in vars(default).items() if value is text)
    wrap = lambda fields: {inner: fields} if inner else fields
    kept = {}
    while known:
        try:
            config = config_class(**wrap({**kept, **known}))
            model_of(config)
            return config
        except Exception:  # a size that the others do not allow: without the last one
            known.popitem()
    return None


def stated(config, key):
    try:
        return getattr(config, key, None) is not None
    except Exception:  # differs by layer: transformers refuses to say one
        return False


def count_of(model):
    """Parameters, biases that select experts and factors of layers, which are buffers there and tensors of every checkpoint."""
    kept = ("correction_bias", "expert_bias", "e_score_bias", "layer_scalar")
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(kept)]
    return sum(tensor.numel() for tensor in [*model.parameters(), *buffers])


def model_of(config):
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(config)


def saved(config, architecture):
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))


def row_of(model_type, architecture, name, sizes):
    row = {"model_type": model_type, "architecture": architecture, "sizes": name, "parameters": None,
           "config": {"architectures": [architecture], "model_type": model_type}}
    try:
        config_class = CONFIG_MAPPING[model_type]
        config = build(config_class, sizes) if sizes else config_class()
        model = model_of(config)
    except Exception as error:
        print(f"{model_type} {name}: no model: {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
        return row
    row["parameters"] = count_of(model)
    if architecture in READ:
        row["config"] = saved(config, architecture)
    return row


def rows(only):
    for model_type, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        for name, sizes in (("default", {}), ("small", SMALL)):
            if not only or model_type in only:
                yield row_of(model_type, architecture, name, sizes)


def differences(path):
    """Rows of the table that the installed package makes otherwise; None where it is of another version."""
    table = [json.loads(line) for line in open(path, encoding="utf-8")]
    versions = {row["config"].get("transformers_version") for row in table} - {None}
    if versions != {transformers.__version__}:
        return None
    kept = {(row["model_type"], row["sizes"]): row for row in table}
    return [f"{row['model_type']} {row['sizes']}" for row in rows(set()) if kept.get((row["model_type"], row["sizes"])) != row]


def main(verb, path, *only):
    if verb == "write":
        with open(path, "w", encoding="utf-8") as out:
            for row in rows(set(only)):
                out.write(json.dumps(row) + "\n")
        return 0
    found = differences(path)
    if found is None:
        print(f"skipped: the table is of another version than {transformers.__version__}")
        return 77
    for name in found:
        print(f"{name}: transformers saves or counts it otherwise than {path}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
