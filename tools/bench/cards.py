#!/usr/bin/env python3
"""How far a profile's plans are off on other cards of its kind, and what factors that cards' steps tell would make of it.

    tools/bench/cards.py build/tools/moe-plan PROFILE DOCUMENT.. [--without TEXT] [--residuals FILE] [--kinds]

Documents are those of tools/gpu-check, a card each, or several. The plans are priced once by PROFILE. Then seconds of products and
attention get a factor, and the other ones a factor or the step a constant, by least squares on the other documents, each of which counts
alike: no document's own steps are in its factors. Prints of every document how far steps are off in the mean (with the sign in brackets)
and at worst. --without leaves out plans whose name holds TEXT. --residuals adds log(predicted / measured rate) of all steps to FILE, a list of
rows as in profiles/measured/gpu-residuals.json, from which replay has its intervals on calibrated GPUs. --kinds prints instead which kinds of
ops are off alike on all cards: by how much of a step, in the mean over plans, with the deviation of the documents, and priced over measured.
"""
import argparse
import collections
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import repriced

FEWEST = 5  # plans of a document
COMPUTES = ("gemm", "grouped_gemm", "attention")


def priced(program, profile, gpus, without):
    """By plan: its model's class, TFLOPS, seconds of its step, and those by kind of op."""
    os.environ.setdefault("MOE_PLAN_PROFILES", str(repriced.ROOT / "profiles"))
    check, found = repriced.gpu_check(), {}
    with tempfile.TemporaryDirectory() as folder:
        one = check.Check(program.parents[1], pathlib.Path(folder), 3600.0)
        trace = pathlib.Path(folder) / "trace.json"
        for name, kind, changed, seq, gbs, fields, precision in repriced.plans_of(check, gpus):
            if without and without in name:
                continue
            model = one.model(kind, changed)
            if one.searched(model, seq, gbs, fields, hardware=profile, gpus=gpus, precision=precision) is None:
                print(f"{name} is left out", file=sys.stderr)
                continue
            said = json.loads(subprocess.run([program, "replay", "plan.json", "--trace", trace, "--json"], cwd=folder, check=True,
                                             capture_output=True, text=True).stdout)
            found[name] = model["architectures"][0], said["tflops_per_gpu"], said["step_seconds"], repriced.kinds(trace)
    return found


def gpus_of(document):
    over = re.match(r"(\d+) x ", document["device"])
    return int(over[1]) if over else 1


def residuals(path, document, plans, profile):
    """Rows of the document's steps; a card is a system's, and all count as of tier A."""
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    for name, (family, tflops, _, _) in plans.items():
        if reached.get(name + ": step"):
            off = round(math.log(tflops / reached[name + ": step"]), 4)
            yield {"run_id": f"{path.stem}: {name}", "family": family, "system": re.search("[HB][0-9]+", document["device"])[0],
                   "kind": "MoE", "tier": "A", "log_residual": off, "system_left_out": off, "source": f"priced by {profile}"}


def steps_of(document, plans):
    """Pairs of (seconds that compute, other seconds) as priced, over the measured seconds of the step, and 1 ms over them."""
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    steps = []
    for name, (_, tflops, step, kinds) in plans.items():
        if reached.get(name + ": step"):
            measured = step * tflops / reached[name + ": step"]
            computes = sum(seconds for kind, seconds in kinds.items() if kind.startswith(COMPUTES))
            steps.append((computes / measured, (step - computes) / measured, 1e-3 / measured))
    return steps


def factors(documents, ways):
    """The most likely numbers in x = a * ways(step)[0] + b * ways(step)[1] + ways(step)[2] = 1; one of them where ways gives None."""
    aa = ab = bb = ya = yb = 0.0
    for steps in documents:
        for step in steps:
            a, b, fixed = ways(step)
            b, weight = b or 0.0, 1 / len(steps)
            aa, ab, bb = aa + weight * a * a, ab + weight * a * b, bb + weight * b * b
            ya, yb = ya + weight * a * (1 - fixed), yb + weight * b * (1 - fixed)
    if bb == 0.0:
        return ya / aa, 0.0
    return (ya * bb - yb * ab) / (aa * bb - ab * ab), (yb * aa - ya * ab) / (aa * bb - ab * ab)


WAYS = {
    "as it is": None,
    "products and attention by a factor": lambda step: (step[0], None, step[1]),
    "and the other ops by another": lambda step: (step[0], step[1], 0.0),
    "products and attention, and ms a step": lambda step: (step[0], step[2], step[1]),
    "ms a step": lambda step: (step[2], None, step[0] + step[1]),
}


def errors(steps, ways, found):
    """Relative errors of rates: measured over predicted seconds, less 1."""
    if ways is None:
        return [1 / (computes + rest) - 1 for computes, rest, _ in steps]
    return [1 / (found[0] * a + found[1] * (b or 0.0) + fixed) - 1 for a, b, fixed in map(ways, steps)]


def tell(documents):
    """The table of each way to correct the profile."""
    for what, ways in WAYS.items():
        print(f"\n{what}")
        off = []
        for name, steps in documents.items():
            found = factors([s for other, s in documents.items() if other != name], ways) if ways else (1.0, 0.0)
            off.append(errors(steps, ways, found))
            print(f"  {name:<46} {statistics.mean(map(abs, off[-1])):.2%} ({statistics.mean(off[-1]):+.2%}), worst {max(map(abs, off[-1])):.1%}"
                  + (f", by {found[0]:.4f} {found[1]:.4f}" if ways else ""))
        means = [statistics.mean(map(abs, e)) for e in off]
        print(f"  {len(off)} documents: mean {statistics.mean(means):.2%}, the worst of them {max(means):.2%}, "
              f"worst step {max(abs(x) for e in off for x in e):.1%}; cards deviate by {statistics.stdev(statistics.mean(e) for e in off):.2%}")


def kinds_of(document, plans):
    """By kind of op: pairs of (priced, measured) shares of the measured step, one of each plan that has it."""
    reached, found = {row["name"]: row["reference"] for row in document["rows"]}, collections.defaultdict(list)
    for plan in document["plans"]:
        if plan["name"] not in plans or not reached.get(plan["name"] + ": step"):
            continue
        _, tflops, step, kinds = plans[plan["name"]]
        measured = step * tflops / reached[plan["name"] + ": step"]
        for kind in plan["by_kind"]:
            if not kind["kind"].startswith(repriced.WAITS + ("copy_",)):
                found[kind["kind"]].append((kinds[kind["kind"]] / measured, kind["measured_seconds"] / measured))
    return found


def tell_kinds(documents):
    """The kinds that are off by 0.05 % of a step or more, the farthest first."""
    off, ratios = collections.defaultdict(list), collections.defaultdict(list)
    for kinds in documents:
        plans = max(map(len, kinds.values()))
        for kind, pairs in kinds.items():
            off[kind].append(sum(priced - measured for priced, measured in pairs) / plans)
            ratios[kind].append(sum(priced for priced, _ in pairs) / sum(measured for _, measured in pairs))
    for kind in sorted(off, key=lambda kind: -abs(statistics.mean(off[kind]))):
        if abs(statistics.mean(off[kind])) >= 5e-4:
            print(f"{kind:<20} {statistics.mean(off[kind]):+.2%} of a step, documents deviate by {statistics.pstdev(off[kind]):.2%}; "
                  f"priced over measured {statistics.mean(ratios[kind]):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("profile")
    parser.add_argument("documents", nargs="+", type=pathlib.Path)
    parser.add_argument("--without", default="")
    parser.add_argument("--residuals", type=pathlib.Path)
    parser.add_argument("--kinds", action="store_true")
    said = parser.parse_args()
    profile = str(pathlib.Path(said.profile).resolve()) if pathlib.Path(said.profile).is_file() else said.profile
    documents = {path: json.loads(path.read_text()) for path in said.documents}
    plans = {gpus: priced(said.program.resolve(), profile, gpus, said.without) for gpus in {gpus_of(d) for d in documents.values()}}
    if said.kinds:
        return tell_kinds([kinds_of(document, plans[gpus_of(document)]) for document in documents.values()])
    if said.residuals:
        rows = json.loads(said.residuals.read_text()) if said.residuals.exists() else []
        for path, document in documents.items():
            rows += residuals(path, document, plans[gpus_of(document)], pathlib.Path(said.profile).stem)
        said.residuals.write_text("[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n")
    steps = {path.stem: steps_of(document, plans[gpus_of(document)]) for path, document in documents.items()}
    steps = {name: list_of for name, list_of in steps.items() if len(list_of) >= FEWEST}
    if len(steps) > 2:
        tell(steps)


main()
