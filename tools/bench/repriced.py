#!/usr/bin/env python3
"""Prices the plans of a document of tools/gpu-check again, with this build and a profile, beside what was measured then.

    tools/bench/repriced.py build/tools/moe-plan profiles/measured/CHECK.json [HARDWARE, by default h200-measured]

Prints how far steps are off, and the farthest ratios of op kinds that compute for more than 5 % of a step.
"""
import collections
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
# Measured, these hold what a rank waits for others.
WAITS = ("all_", "reduce_scatter", "dispatch_tokens", "combine_tokens", "expert_counts", "ring_exchange", "send", "recv")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def gpu_check():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "tools/gpu-check"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def plans_of(check, gpus):
    """What tools/gpu-check predicts and trains on so many GPUs: (name, model, changed configuration, sequence, batch, fields, precision)."""
    if gpus > 1:
        for kind, changed, seq, samples, fields, _ in check.gpu_ranks.LARGE[gpus] + check.gpu_ranks.PLANS:
            fields = check.gpu_ranks.filled(fields, gpus)
            yield check.gpu_ranks.name_of(kind, changed, seq, fields, gpus), kind, changed, seq, samples * gpus, fields, "bf16"
        return
    low = [(*check.LOW_PLAN, precision) for precision in ("bf16", "fp8-blockwise")]
    for kind, changed, seq, gbs, fields, *precision in check.PLANS + low:
        name = " ".join([check.name_of(kind, changed, seq, fields), *precision])
        yield name, kind, changed, seq, gbs, "cuda_graph=full " + fields, *(precision or ["bf16"])


def kinds(trace):
    """Busy seconds by kind, the mean of the ranks that were played."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    ranks, seconds = len({event["pid"] for event in events}), collections.Counter()
    for event in events:
        seconds[event["name"]] += event["args"]["busy"] / 1e6 / ranks
    return seconds


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    program, document = pathlib.Path(sys.argv[1]).resolve(), json.loads(pathlib.Path(sys.argv[2]).read_text())
    os.environ.setdefault("MOE_PLAN_PROFILES", str(ROOT / "profiles"))
    hardware, check = sys.argv[3] if len(sys.argv) == 4 else "h200-measured", gpu_check()
    over = re.match(r"(\d+) x ", document["device"])
    gpus = int(over[1]) if over else 1
    by_kind = {plan["name"]: plan["by_kind"] for plan in document["plans"]}
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    steps, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        one = check.Check(pathlib.Path(program).parents[1], pathlib.Path(folder), 3600.0)
        for name, kind, changed, seq, gbs, fields, precision in plans_of(check, gpus):
            if (rate := reached.get(name + ": step")) is None:  # did not fit, or is younger than the document
                continue
            if one.searched(one.model(kind, changed), seq, gbs, fields, hardware=hardware, gpus=gpus, precision=precision) is None:
                sys.exit(one.rows.list[-1]["name"])
            trace = pathlib.Path(folder) / "trace.json"
            replayed = json.loads(subprocess.run([program, "replay", "plan.json", "--trace", trace, "--json"], cwd=folder, check=True,
                                                 capture_output=True, text=True).stdout)
            steps.append(replayed["tflops_per_gpu"] / rate - 1)
            print(f"{name:<96} {steps[-1]:+.1%}", flush=True)
            priced, measured = kinds(trace), by_kind.get(name, [])
            whole = sum(k["measured_seconds"] for k in measured)
            ratios += [(priced[k["kind"]] / k["measured_seconds"], k["kind"], name) for k in measured
                       if k["measured_seconds"] > 0.05 * whole and not k["kind"].startswith(WAITS)]
    for ratio, kind, name in sorted(ratios)[:3] + sorted(ratios)[-3:]:
        print(f"{ratio:.3f} {kind}, {name}")
    far = sum(not 1 / 1.1 <= ratio <= 1.1 for ratio, _, _ in ratios)
    print(f"{len(steps)} steps: mean {sum(map(abs, steps)) / len(steps):.1%}, worst {max(map(abs, steps)):.1%}; "
          f"{len(ratios)} op kinds, {far} of them beyond 10 %")


if __name__ == "__main__":
    main()
