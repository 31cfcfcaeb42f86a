#!/usr/bin/env python3
"""Writes the performance recipes of Megatron-Bridge's releases as rows of profiles/runs/recipes/megatron-bridge.csv.

    git clone --bare https://github.com/NVIDIA-NeMo/Megatron-Bridge /tmp/bridge
    tools/bench/bridge_recipes.py /tmp/bridge > profiles/runs/recipes/megatron-bridge.csv

A recipe is a `WorkloadBaseConfig` of scripts/performance/configs; layouts that it leaves out are those that the
release's model recipes take for its pipeline. A row has the columns of published runs without any figure of a run.
"""
import csv
import dataclasses
import re
import subprocess
import sys
import types

# Tags of the containers' releases (docs/releases/software-versions.md).
TAGS = {"v0.2.0": "25.11", "v0.3.0": "26.02", "v0.3.1": "26.02.01", "v0.4.0": "26.04", "v0.4.1": "26.04.01",
        "v0.5.0": "26.06"}
# Model profile, sequence length of the published tables, experts, file that holds the layouts of its pipelines.
MODELS = {
    "DEEPSEEK_V3": ("DeepSeek-V3", 4096, True, "deepseek/deepseek_v3.py"),
    "KIMI_K2": ("Kimi-K2", 4096, True, "kimi/kimi_k2.py"),
    "QWEN3_235B_A22B": ("Qwen3-235B-A22B", 4096, True, None),
    "QWEN3_30B_A3B": ("Qwen3-30B-A3B", 4096, True, None),
    "GPT_OSS_120B": ("GPT-OSS-120B", 4096, True, None),
    "NEMOTRON_3_NANO": ("Nemotron-3-Nano", 8192, True, None),
    "NEMOTRON_3_SUPER": ("Nemotron-3-Super", 8192, True, None),
    "LLAMA3_8B": ("Llama3-8B", 8192, False, None),
    "LLAMA3_70B": ("Llama3-70B", 8192, False, None),
    "LLAMA31_405B": ("Llama3.1-405B", 8192, False, None),
}
PRECISIONS = {"BF16": "BF16", "FP8_CS": "FP8-tensor(current)", "FP8_MX": "MXFP8", "FP8_SC": "FP8-blockwise",
              "NVFP4": "NVFP4"}
COLUMNS = ("run_id,source,release,model,system,gpus,precision,gbs,mbs,seq_len,fsdp,tp,pp,vpp,cp,ep,etp,"
           "recompute_modules,offload_modules,cuda_graph,dispatcher,ep_overlap,pipeline_layout,mtp_layers,status").split(",")
NAME = re.compile(r"(?P<model>[A-Z0-9_]+?)(?:_PRETRAIN_CONFIG)?_(?P<system>GB300|GB200|B300|B200|H100)_"
                  r"(?P<precision>BF16|FP8_CS|FP8_MX|FP8_SC|NVFP4)(?:_BASE_CONFIG|_V\d+)?$")


def git(repository, *words):
    return subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True, check=True).stdout


def configurations(text):
    """The WorkloadBaseConfig objects of a module by their names."""
    fields = sorted(set(re.findall(r"^    (\w+)=", text, re.M)))
    config = dataclasses.make_dataclass("WorkloadBaseConfig", [(name, object, None) for name in fields])
    package, module = types.ModuleType("utils"), types.ModuleType("utils.utils")
    module.WorkloadBaseConfig = config
    sys.modules.update({"utils": package, "utils.utils": module})
    names = {}
    exec(compile(text, "workload_base_configs", "exec"), names)
    return {name: value for name, value in names.items() if isinstance(value, config)}


def stage(units):
    """["embedding", "decoder", "decoder"] as "Ett"."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    return "".join(letters[unit] for unit in units)


def layouts(text):
    """Layout strings by (pp, vpp), of a recipe that has a table of them."""
    found = re.search(r"(?:layout_map|map_pp_vp_to_layout) = (\{.*?\n    \})", text, re.S)
    if found is None:
        return {}
    table = eval(found.group(1), {"last_layer": ["mtp", "loss"]})
    return {key: "|".join(stage(units) for units in stages) for key, stages in table.items() if stages}


def graph(config):
    implementation = getattr(config, "cuda_graph_impl", None) or "none"
    scope = getattr(config, "cuda_graph_scope", None) or []
    if implementation == "none":
        return "none"
    scopes = [scope] if isinstance(scope, str) else scope
    return f"{implementation}:{'+'.join(scopes)}" if scopes else "none"


def row(tag, name, config, known_layouts):
    match = NAME.match(name)
    if match is None or match["model"] not in MODELS:
        return None
    model, seq_len, routed, _ = MODELS[match["model"]]

    def value(field, default=None):
        found = getattr(config, field, None)
        return default if found is None else found

    pp, vpp = value("pipeline_model_parallel_size", 1), value("virtual_pipeline_model_parallel_size", 1)
    layers = value("cpu_offloading_num_layers")
    # Recomputation of whole layers is stated by their number: no set of modules says it.
    modules = "" if value("recompute_num_layers") else "+".join(value("recompute_modules", [])) or "none"
    return {
        "run_id": f"{name.lower()}@{tag}", "source": f"Megatron-Bridge {tag} scripts/performance/configs: {name}",
        "release": TAGS[tag], "model": model, "system": match["system"], "gpus": value("num_gpus", 1),
        "precision": PRECISIONS[match["precision"]], "gbs": value("global_batch_size", 1),
        "mbs": value("micro_batch_size", 1), "seq_len": seq_len, "fsdp": int(value("use_megatron_fsdp", False)),
        "tp": value("tensor_model_parallel_size", 1), "pp": pp, "vpp": vpp,
        "cp": value("context_parallel_size", 1), "ep": value("expert_model_parallel_size", 1),
        "etp": value("expert_tensor_parallel_size", 1) if routed else "",
        "recompute_modules": modules, "offload_modules": f"layer-activations({layers} layers)" if layers else "none",
        "cuda_graph": graph(config),
        "dispatcher": value("moe_flex_dispatcher_backend", "alltoall") if routed else "",
        "ep_overlap": int(value("moe_a2a_overlap", False)) if routed else "",
        "pipeline_layout": value("pp_layout", known_layouts.get((pp, vpp), "")), "status": "recipe",
    }


def main():
    repository = sys.argv[1]
    out = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    out.writeheader()
    said = {}  # recipes of a container and its patches by name: a patch states what it changes
    for tag in TAGS:
        tables = {}
        for key, (_, _, _, path) in MODELS.items():
            if path is not None:
                whole = f"src/megatron/bridge/recipes/{path}"
                if git(repository, "ls-tree", "--name-only", tag, whole):
                    tables[key] = layouts(git(repository, "show", f"{tag}:{whole}"))
        files = git(repository, "ls-tree", "-r", "--name-only", tag, "scripts/performance/configs").split()
        for path in files:
            if not path.endswith("workload_base_configs.py"):
                continue
            for name, config in configurations(git(repository, "show", f"{tag}:{path}")).items():
                match = NAME.match(name)
                known = tables.get(match["model"], {}) if match else {}
                recipe = row(tag, name, config, known)
                if recipe is None:
                    continue
                settings = {key: cell for key, cell in recipe.items() if key not in ("run_id", "source", "release")}
                container = ".".join(TAGS[tag].split(".")[:2])
                if said.get((container, name)) != settings:
                    said[container, name] = settings
                    out.writerow(recipe)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
