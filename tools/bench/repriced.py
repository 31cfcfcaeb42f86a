#!/usr/bin/env python3
"""Prices the plans of a document of tools/gpu-check again, with this build and a profile, beside what was measured then.

    tools/bench/repriced.py build/tools/moe-plan profiles/measured/CHECK.json [HARDWARE, by default h200-measured]

Of one GPU. Prints how far steps are off, and the ratio of every op kind that holds more than 5 % of a step.
"""
import collections
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]


def gpu_check():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "tools/gpu-check"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def name_of(plan):  # as tools/gpu-check writes it
    kind, changed, seq, _, fields = plan
    return " ".join([kind, *(f"{k}={v}" for k, v in changed.items()), f"seq={seq}", fields])


def kinds(trace):
    seconds = collections.Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            seconds[event["name"]] += event["args"]["busy"] / 1e6
    return seconds


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    program, document = pathlib.Path(sys.argv[1]).resolve(), json.loads(pathlib.Path(sys.argv[2]).read_text())
    os.environ.setdefault("MOE_PLAN_PROFILES", str(ROOT / "profiles"))
    hardware, check = sys.argv[3] if len(sys.argv) == 4 else "h200-measured", gpu_check()
    low = ("bf16", "fp8-blockwise")
    plans = [(*plan, "bf16", name_of(plan)) for plan in check.PLANS]
    plans += [(*check.LOW_PLAN, precision, f"{name_of(check.LOW_PLAN)} {precision}") for precision in low]
    measured_of = {plan["name"]: plan for plan in document["plans"]}
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    steps, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        one = check.Check(pathlib.Path(program).parents[1], pathlib.Path(folder), 3600.0)
        for kind, changed, seq, gbs, fields, precision, name in plans:
            if (measured := measured_of.get(name)) is None:  # did not fit, or is younger than the document
                continue
            if one.searched(one.model(kind, changed), seq, gbs, "cuda_graph=full " + fields, hardware=hardware,
                            precision=precision) is None:
                sys.exit(one.rows.list[-1]["name"])
            trace = pathlib.Path(folder) / "trace.json"
            replayed = json.loads(subprocess.run([program, "replay", "plan.json", "--trace", trace, "--json"], cwd=folder, check=True,
                                                 capture_output=True, text=True).stdout)
            steps.append(replayed["tflops_per_gpu"] / reached[measured["name"] + ": step"] - 1)
            print(f"{measured['name']:<96} {steps[-1]:+.1%}", flush=True)
            priced, whole = kinds(trace), sum(k["measured_seconds"] for k in measured["by_kind"])
            ratios += [(priced[k["kind"]] / k["measured_seconds"], k["kind"], measured["name"]) for k in measured["by_kind"]
                       if k["measured_seconds"] > 0.05 * whole]
    for ratio, kind, name in sorted(ratios)[:3] + sorted(ratios)[-3:]:
        print(f"{ratio:.3f} {kind}, {name}")
    far = sum(not 1 / 1.1 <= ratio <= 1.1 for ratio, _, _ in ratios)
    print(f"{len(steps)} steps: mean {sum(map(abs, steps)) / len(steps):.1%}, worst {max(map(abs, steps)):.1%}; "
          f"{len(ratios)} op kinds, {far} of them beyond 10 %")


main()
