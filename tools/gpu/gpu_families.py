"""What tools/gpu-check predicts of slices of published models, family by family: few layers, few experts, their own widths."""
import json
import os
import pathlib

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
COMMON = {"vocab_size": 32768, "num_nextn_predict_layers": 0}

# A profile, the layers and experts kept of it, and fields of its plan. One layer at most stays dense where a model begins with several.
SLICES = [
    ("Qwen3-Next-80B-A3B", 4, 64, "mbs=1"),
    ("Qwen3.5-35B-A3B", 4, 64, "mbs=2"),
    ("Nemotron-3-Nano", 7, 32, "mbs=1"),
    ("Nemotron-3-Super", 7, 64, "mbs=1"),
    ("DeepSeek-V3.2", 2, 16, "mbs=1"),
    ("GLM-5", 2, 16, "mbs=1"),
    ("MiMo-V2-Flash", 3, 16, "mbs=1"),
    ("Laguna-S-2.1", 4, 32, "mbs=1"),
    ("MiniMax-M2", 3, 32, "mbs=1"),
    ("GLM-4.7-Flash", 4, 64, "mbs=1"),
    ("GLM-4.5-Air", 3, 32, "mbs=1"),
    ("K-EXAONE-236B-A23B", 3, 16, "mbs=1"),
    ("Ling-mini-2.0", 4, 64, "mbs=2"),
    ("Hunyuan-A13B", 2, 16, "mbs=1"),
    ("Hy3", 3, 32, "mbs=1"),
    ("ERNIE-4.5-21B-A3B", 4, 32, "mbs=1"),
    ("Granite-3.1-3B-A800M", 8, 40, "mbs=2"),
    ("OLMoE-1B-7B", 3, 64, "mbs=2"),
    ("Trinity-Mini", 4, 64, "mbs=1"),
    ("Mistral-Small-4", 2, 32, "mbs=1"),
    ("GPT-OSS-20B", 3, 16, "mbs=1"),
    ("Llama4-Scout", 2, 4, "mbs=1"),
    ("DBRX", 2, 4, "mbs=1"),
    ("DeepSeekMoE-16B", 4, 64, "mbs=2"),
    ("Solar-Open-100B", 3, 32, "mbs=1"),
    ("Qwen3-30B-A3B", 4, 64, "mbs=2 offload=optimizer_step"),
    ("Qwen3-30B-A3B", 4, 128, "mbs=2 expert_capacity=1.25"),
]


def sliced(config, layers, experts):
    """The configuration of so many layers and experts: lists and patterns with an entry per layer are cut too."""
    count = "n_layers" if "n_layers" in config else "num_hidden_layers"
    whole = config[count]
    cut = {key: value[:layers] if isinstance(value, (list, str)) and len(value) == whole else value for key, value in config.items()}
    for part in (cut, cut.get("ffn_config", {})):
        part.update({key: experts for key in EXPERTS if part.get(key)})
    cut.update(COMMON, **{count: layers})
    if cut.get("first_k_dense_replace"):
        cut["first_k_dense_replace"] = 1
    return cut


def predicted(check):
    """check: of tools/gpu-check, which has calibrated or was given a profile. Plans are priced for balanced routing and run with it."""
    for name, layers, experts, fields in SLICES:
        profile = pathlib.Path(os.environ["MOE_PLAN_PROFILES"]) / "models" / f"{name}.json"
        model = sliced(json.loads(profile.read_text()), layers, experts)
        compared = check.trained(model, 4096, 4, "cuda_graph=full " + fields, seconds=1.5, more=("--balance", "forced"))
        if compared is not None:
            check.compared(f"{name}, {layers} layers, {experts} experts, {fields}", compared)
