"""Holds what `moe-plan launch` writes for Megatron to the installed megatron-core, on random plans of real models.

usage: launched.py MOE_PLAN [--count N] [--seed S] [--transformer-engine V]

Random plans of the profiles of models and machines are written as plan.json. Those that `launch --megatron-core` takes
must be constructed by the package, in all three of its classes; those that `launch --megatron-lm` takes must pass
parse_args and validate_args of megatron/training/arguments.py, and be what the script passes on where it is run. The
plans are of the stacks whose release is the installed one. The exit status is 1 where the package refuses a plan, and 77
without the package, or where no stack is of its release.

Causes in the environment are stood in for, none is forgiven: arguments.py names them.
"""

import argparse
import collections
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import arguments as parser_of_megatron
import oracle
import plans

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILES = ROOT / "profiles"

# The profile of a model, and the words of plans.py that say which choices it has.
MODELS = {
    "DeepSeek-V3": "deepseek", "DeepSeek-V3.2": "sparse", "GLM-4.5-Air": "deepseek", "GLM-4.7-Flash": "deepseek", "GLM-5.2": "sparse",
    "GPT-OSS-120B": "gpt-oss", "Hy3": "deepseek", "K-EXAONE-236B-A23B": "deepseek", "Kimi-K2": "deepseek", "Ling-1T": "deepseek",
    "Llama3-70B": "dense", "Mixtral-8x22B": "mixtral", "Nemotron-3-Nano": "qwen3", "Nemotron-3-Super": "qwen3", "Qwen3-235B-A22B": "qwen3",
    "Qwen3-Next-80B-A3B": "gated-delta", "Qwen3.5-35B-A3B": "gated-delta", "Solar-Open-100B": "deepseek",
}  # fmt: skip
MACHINES = ["h100", "h200", "b200", "gb200-nvl72", "gb300-nvl72"]
ON = ["fsdp", "paged_stash", "tp_overlap", "ep_overlap", "delay_wgrad", "deterministic"]
ROUTER = ["aux_loss", "z_loss", "input_jitter", "bias_update", "expert_capacity"]


def profile(folder, name):
    return json.loads((PROFILES / folder / f"{name}.json").read_text())


def whole(text, none=0):
    return none if text == "none" else float(text)


def document(generator, stacks):
    """A plan.json of one of the stacks that may or may not be sound, and the words that it was made from."""
    name, machine = generator.choice(sorted(MODELS)), generator.choice(MACHINES)
    facts = plans.MODELS[MODELS[name]]
    words = {**plans.PLAIN, **plans.choose(generator, plans.PLAIN, facts)}
    for field, choices in (
        ("mbs", ["2", "4"]), ("rank_order", ["tp-cp-ep-pp-dp"]), ("gradients", ["bf16"]), ("cp_comm", ["alltoall"]),
        ("tp_overlap", ["on"]), ("offload", ["optimizer"]), ("z_loss", ["0.001"]), ("input_jitter", ["0.01"]), ("drop_policy", ["position"]),
        ("attention_precision", ["fp8-tensor", "mxfp8"]),
    ):  # fmt: skip
        if generator.random() < 0.08:
            words[field] = generator.choice(choices)
    sizes = {field: int(words[field]) for field in ("tp", "cp", "pp", "vpp", "ep", "etp")}
    sizes["dp"] = generator.choice([4, 8, 16, 32])
    ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
    mbs = int(words["mbs"])
    plan = {
        "schema": "moe-plan/plan/1",
        "schema_version": 1,
        "stack": generator.choice(stacks),
        "workload": {"seq": generator.choice([4096, 8192]), "gbs": mbs * sizes["dp"] * 32, "routing": "balanced"},
        "mesh": {
            "gpus": ranks * sizes["pp"], **sizes, "edp": ranks // (sizes["ep"] * sizes["etp"]),
            "rank_order": words["rank_order"],
        },
        "mbs": mbs,
        "layout": "",
        "capacity": whole(words["capacity"]),
        "model": profile("models", name),
        "hardware": profile("hardware", machine),
        "recompute": [] if words["recompute"] == "none" else words["recompute"].split("+"),
        "offload": [] if words["offload"] == "none" else words["offload"].split("+"),
        "router": {
            "load_balancing": words["load_balancing"], "forced": words["balance"] == "forced",
            "drop_policy": words["drop_policy"], "drop_scope": words["drop_scope"], "pad_to_capacity": words["pad_to_capacity"] == "on",
            **{field: whole(words[field]) for field in ROUTER},
        },
    }  # fmt: skip
    for field in ("schedule", "precision", "fp8_scaling", "gradients", "optimizer", "dispatcher", "cp_comm", "cuda_graph"):
        plan[field] = words[field]
    for field in ("attention_precision", "head_precision"):
        if words[field] != "default":
            plan[field] = words[field]
    if words["bf16_layers"] != "none":
        plan["bf16_layers"] = [int(one) for one in words["bf16_layers"].split("+")]
    plan.update({field: words[field] == "on" for field in ON})
    words.update(hardware=machine, dp=str(sizes["dp"]), seq=str(plan["workload"]["seq"]), gbs=str(plan["workload"]["gbs"]))
    return plan, words


def stacks_of(installed):
    """The stacks whose plans are told in the words of that release, patch releases aside, and the release that they name."""
    found = {}
    for file in sorted((PROFILES / "stacks").glob("*.json")):
        engine = json.loads(file.read_text()).get("engine") or {}
        release = engine.get("release") or ""
        if engine.get("name") == "megatron-core" and release.split(".")[:2] == installed.split(".")[:2]:
            if not release.endswith(".99"):
                found.setdefault(release, []).append(file.stem)
    release = max(found, default=None)
    return found.get(release, []), release


class Launcher:
    def __init__(self, program, folder):
        self.program, self.folder, self.path = program, folder, folder / "plan.json"
        stand_in = folder / "torchrun"
        stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        stand_in.chmod(0o755)

    def launch(self, plan, option):
        """The document, or the line that refuses the plan."""
        self.path.write_text(json.dumps(plan))
        done = subprocess.run(
            [self.program, "launch", str(self.path), option, "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode == 2:
            return None, done.stderr.strip().splitlines()[-1]
        if done.returncode != 0:
            raise RuntimeError(f"launch {option}: exit status {done.returncode}: {done.stderr}")
        return json.loads(done.stdout), None

    def passed_on(self, text, nodes):
        """The words that the script gives to Megatron-LM's program, by running it with a stand-in for torchrun."""
        script = self.folder / "run.sh"
        script.write_text(text)
        known = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
        environment = {**known, "PATH": f"{self.folder}:{known['PATH']}", "MASTER_ADDR": "first"}
        done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
        words = done.stdout.split("\n")[:-1]
        if words[words.index("--nnodes") + 1] != str(nodes):
            raise RuntimeError("the script does not start the plan's nodes")
        program = next(i for i, word in enumerate(words) if word.endswith(".py"))
        return words[program + 1 :]


def constructed(known, said):
    """What one of the three classes refuses the document with; None where all are constructed."""
    for name, kwargs in (
        (said["class"], said["kwargs"]),
        ("OptimizerConfig", said["optimizer"]),
        ("DistributedDataParallelConfig", said["ddp"]),
    ):
        refused = oracle.verdict(known, {"class": name, "kwargs": kwargs})
        if refused:
            return f"{name}: {refused}"
    return None


def differing(said, configuration):
    """Keyword arguments of --megatron-core that Megatron-LM's configuration of the same plan has otherwise."""
    found = []
    for name, value in said["kwargs"].items():
        value, there = oracle.resolved(value), getattr(configuration, name)
        if name == "cuda_graph_modules":
            there = [getattr(one, "name", one) for one in there]
        if name == "pipeline_model_parallel_layout":
            there = str(there)
        if value != there and list_of(value) != list_of(there):
            found.append(f"{name} is {value} in kwargs and {there} by arguments")
    return "; ".join(found) or None


def list_of(value):
    return list(value) if isinstance(value, (list, tuple)) else [value]


def accepted(launcher, plan, said, core, generation):
    configured = []
    refused = parser_of_megatron.check(generation, said["args"], plan["mesh"]["gpus"], said["env"], configured)
    if refused:
        return refused
    unlike = differing(core, configured[0])
    if unlike:
        return unlike
    passed = launcher.passed_on(said["text"], said["nodes"])
    if passed == said["args"]:
        return None
    differ = next(i for i, pair in enumerate(zip(passed + [None], said["args"] + [None])) if pair[0] != pair[1])
    return f"the script passes on {passed[differ:][:3]} where args has {said['args'][differ:][:3]}"


def main():
    parser = argparse.ArgumentParser(description="launch --megatron-core and --megatron-lm against megatron-core.")
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MOE_PLAN_SEED", "1")))
    parser.add_argument("--transformer-engine", default="2.17")
    asked = parser.parse_args()
    known = oracle.load(asked.transformer_engine)
    logging.disable(logging.WARNING)
    installed = oracle.installed()
    stacks, release = stacks_of(installed)
    if not stacks:
        print(f"skipped: no stack is of megatron-core {installed}")
        return oracle.SKIPPED
    generator = random.Random(asked.seed)
    models, machines, refusals, wrong = collections.Counter(), collections.Counter(), collections.Counter(), 0
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(os.path.abspath(asked.program), pathlib.Path(folder))
        while counts["core"] < asked.count:
            plan, _ = document(generator, stacks)
            core, refusal = launcher.launch(plan, "--megatron-core")
            if refusal:
                refusals[refusal.rsplit(" (", 1)[0][:90]] += 1
                if sum(refusals.values()) > 100 * asked.count:
                    print(f"almost every plan is refused: {refusals.most_common(5)}")
                    return 1
                continue
            counts["core"] += 1
            models[plan["model"]["name"]] += 1
            machines[plan["hardware"]["name"]] += 1
            found = [constructed(known, core)]
            arguments, refusal = launcher.launch(plan, "--megatron-lm")
            if arguments is not None:
                counts["lm"] += 1
                generation = "hopper" if plan["hardware"]["name"] in ("h100", "h200") else "blackwell"
                found.append(accepted(launcher, plan, arguments, core, generation))
            for one in filter(None, found):
                wrong += 1
                print(f"refused: {one}")
                shown = {key: value for key, value in plan.items() if key not in ("model", "hardware")}
                print(f"  {plan['model']['name']} on {plan['hardware']['name']}: {json.dumps(shown)}")
    print(
        f"megatron-core {installed} as {', '.join(stacks)} ({release}), seed {asked.seed}: {counts['core']} plans of "
        f"{len(models)} models on {len(machines)} machines, {counts['lm']} of them for Megatron-LM, "
        f"{sum(refusals.values())} not launched, {wrong} refused by the package"
    )
    for refusal, count in refusals.most_common(12):
        print(f"  {count:5d}  {refusal}")
    few = asked.count >= 300 and (len(models) < 6 or len(machines) < 5 or counts["lm"] < counts["core"] // 2)
    return 1 if wrong or few else 0


if __name__ == "__main__":
    sys.exit(main())
