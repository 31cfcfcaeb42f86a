#!/usr/bin/env python3
"""Holds counts of parameters to transformers' modules, one changed field at a time, for every family with experts.

Usage: experts.py MOE_PLAN [--all] [MODEL_TYPE ...]: of each class of the installed transformers whose config has experts (--all: of
every causal language model), a small config and each of its fields changed once. Where the module can be built on the meta device,
`MOE_PLAN show model` must count the same, name the field under "not_read" or refuse in one line. Of a class beside towers the
language model counts. Prints a line for each that differs and the sums; exit status 1 where one does, 77 without the packages.
"""
import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
import transformers
from transformers.models.auto import modeling_auto

from configs import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, SMALL, build, count_of, model_of, saved

EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts|moe_num_primary_experts)$")

# Fields about tokens, files, caches, losses, beginnings and serving change no count.
INERT = re.compile(r"_id$|_ids$|dtype|dropout|initializer|transformers_|cache|output_|pretraining|architectures|model_type|_coef$|"
                   r"id2label|label2id|chunk_size_feed|is_encoder|return_dict|problem_type|_name_or_path|max_position|_eps|epsilon|"
                   r"theta|rope_param|rope_scaling|_jitter|time_step|aux_loss|vocab_size|_act$|_activation$|_scale$|scaling|bos|eos|pad")

# What fields that are null or missing may say.
# Sums of fields beside them, which a changed field would contradict; and sizes of which 0 is none here and an empty matrix there.
DERIVED = {"qk_head_dim"}
NEVER_NONE = {"q_lora_rank", "num_experts_per_tok", "moe_topk", "hc_mult"}

GUESSES = {"sliding_window": [64], "head_dim": [24], "q_lora_rank": [36], "num_key_value_heads": [3], "mlp_only_layers": [[1]],
           "n_shared_experts": [1], "shared_expert_intermediate_size": [72], "intermediate_size": [200], "mamba_dt_rank": [7]}


# Types of the four small layers, of classes that have none by default.
LAYERS = {"lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
          "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}}


def text_of(config):
    """The saved config of a language model, and the dictionary of it that holds its fields."""
    names = ("text_config", "llm_config", "language_config", "thinker_config")
    inner = next((key for key in names if isinstance(config.get(key), dict)), None)
    return text_of(config[inner]) if inner else config


def has_experts(config_class):
    try:
        text = config_class().get_text_config()
    except Exception:
        return False
    return any(EXPERTS.match(key) for key in [*vars(text), *getattr(text, "attribute_map", {})])


def values(key, value, layers):
    """Other values for a field, by the kind of the one it has."""
    if value is None or value == []:
        return GUESSES.get(key, [])
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        least = 1 if key in NEVER_NONE else 0
        return [other for other in dict.fromkeys([0, 1, 2, value * 2, value // 2]) if other != value and other >= least]
    if isinstance(value, list) and len(value) == layers and all(isinstance(entry, (str, int, bool)) for entry in value):
        kinds = list(dict.fromkeys(value))
        return [value[::-1], *[[kind] * layers for kind in kinds]]
    return [None] if isinstance(value, (int, float, list)) else []


def variants(config, layers):
    yield "as it is", config
    for key, value in text_of(config).items():
        if INERT.search(key) or isinstance(value, dict):
            continue
        for other in values(key, value, layers):
            changed = copy.deepcopy(config)
            text_of(changed)[key] = other
            yield f"{key} = {json.dumps(other)[:60]}", changed


TOWERS = {**getattr(modeling_auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {}),
          **getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {})}


def module_of(config):
    """Parts of the class's model that are its language model, on the meta device."""
    if type(config).model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return [model_of(config)]
    name = TOWERS[type(config).model_type]
    with torch.device("meta"):
        model = getattr(transformers, name[0] if isinstance(name, tuple) else name)(config)
    text = type(config.get_text_config())
    return [next(part for part in model.modules() if type(getattr(part, "config", None)) is text), model.get_output_embeddings()]


def theirs(model_type, architecture, config):
    """Parameters of the class's language model and the config as it saves it, or the fault that transformers finds."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            read = CONFIG_MAPPING[model_type].from_pretrained(folder)
        return count_of(torch.nn.ModuleList(module_of(read))), saved(read, architecture)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}", None


def ours(moe_plan, config):
    """Parameters that MOE_PLAN counts, or its line."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        run = subprocess.run([moe_plan, "show", "model", str(path), "--json"], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return run.stderr.strip().replace(str(path), "config.json"), []
    shown = json.loads(run.stdout)
    return shown["parameters_without_mtp"], shown["not_read"]


def small_config(model_type):
    """The class's config with small sizes, also those that it leaves null; sizes that it refuses are left out."""
    config_class = CONFIG_MAPPING[model_type]
    config = build(config_class, SMALL)
    if config is not None:
        return config
    default = config_class()
    text = default.get_text_config()
    inner = None if text is default else next(key for key, value in vars(default).items() if value is text)
    make = lambda fields: config_class(**({inner: fields} if inner else fields))
    kept = dict(LAYERS.get(model_type, {}))
    for key, value in SMALL.items():
        try:
            if hasattr(text, key):
                make({**kept, key: value})
                kept[key] = value
        except Exception:
            continue
    return make(kept)


def cases_of(moe_plan, model_type, architecture):
    """(name, verdict, theirs, ours) of every variant of a family, as a person writes it and as the class saves it again."""
    try:
        config = small_config(model_type)
    except Exception as error:
        yield "small", "unbuilt", None, f"{type(error).__name__}: {str(error)[:80]}"
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    whole = saved(config, architecture)
    for key in DERIVED & set(text_of(whole)):
        del text_of(whole)[key]
    if text_of(whole).get("kv_lora_rank"):
        text_of(whole).pop("head_dim", None)
    built = 0
    for name, changed in variants(whole, layers):
        count, written = theirs(model_type, architecture, changed)
        if not isinstance(count, int):
            continue
        built += 1
        for form, asked in (("", changed), (" (saved)", written)):
            found, unread = ours(moe_plan, asked)
            if isinstance(found, str):
                verdict = "refused" if "\n" not in found and found else "crashed"
            else:
                verdict = "same" if found == count else "named" if unread else "differs"
            yield name + form, verdict, count, found
    if built == 0:
        yield "small", "unbuilt", None, theirs(model_type, architecture, whole)[0]


def main(moe_plan, *options):
    every = "--all" in options
    only = [option for option in options if option != "--all"]
    sums, refusals = {}, {}
    families = sorted({**TOWERS, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.items())
    wanted = lambda kind: kind in only if only else kind in CONFIG_MAPPING and (every or has_experts(CONFIG_MAPPING[kind]))
    chosen = [(kind, name) for kind, name in families if wanted(kind)]
    for model_type, architecture in chosen:
        here = {}
        for name, verdict, count, found in cases_of(moe_plan, model_type, architecture):
            here[verdict] = here.get(verdict, 0) + 1
            if verdict in ("differs", "crashed", "named", "unbuilt") or (verdict == "refused" and name == "as it is"):
                print(f"{model_type}: {name}: {verdict}: transformers {count}, ours {found}", flush=True)
            if verdict == "refused" and name == "as it is":
                break
            if verdict == "refused":
                line = re.sub(r"[\d.]+", "N", found.split("config.json: ")[-1])
                refusals.setdefault(line, f"{model_type}: {name}")
        print(f"{model_type}: {here}", flush=True)
        for verdict, number in here.items():
            sums[verdict] = sums.get(verdict, 0) + number
    for line, first in sorted(refusals.items()):
        print(f"refused: {line} ({first})")
    print(f"{len(chosen)} families: {sums}")
    return 1 if sums.get("differs") or sums.get("crashed") else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
