#!/usr/bin/env python3
"""Whether plans are priced better by clocks: those of the measured calls and of the plan, or what one run tells of the card.

    tools/bench/clocked.py build/tools/bench/bench-call-clocks PROFILE DOCUMENT..

Documents are those of tools/gpu-check on one GPU. Where PROFILE keeps the clocks of its calls, seconds of products and attention are
multiplied by (clock of the calls / clock of the plan) to a power, with the clock that the document has of the plan. Then by the factor
that makes one plan of the document right. Prints how far steps are off, in the mean over documents: of all, and with each document's own
mean taken off, which is the card's.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import repriced

POWERS = [0.0, 0.1, 0.2, 0.3, 0.5, 1.0]
FEWEST = 5  # plans of a document


def priced(bench, profile):
    """By plan: TFLOPS, seconds of a step, and pairs of MHz and seconds of what computes."""
    program, found = bench.parents[1] / "moe-plan", {}
    os.environ.setdefault("MOE_PLAN_PROFILES", str(repriced.ROOT / "profiles"))
    check = repriced.gpu_check()
    with tempfile.TemporaryDirectory() as folder:
        def said(*command):
            return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        one = check.Check(bench.parents[2], pathlib.Path(folder), 3600.0)
        for name, kind, changed, seq, gbs, fields, precision in repriced.plans_of(check, 1):
            if one.searched(one.model(kind, changed), seq, gbs, fields, hardware=profile, precision=precision) is None:
                print(f"{name} is left out: {one.rows.list[-1]['name']}", file=sys.stderr)
                continue
            replayed = json.loads(said(program, "replay", "plan.json", "--json"))
            calls = [line.split()[1:] for line in said(bench, "plan.json").splitlines()]
            found[name] = (replayed["tflops_per_gpu"], replayed["step_seconds"], [(float(mhz), float(s)) for mhz, s in calls])
    return found


def measured_in(document, plans):
    """By plan of the document: its TFLOPS and its clock in MHz."""
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    found = {plan["name"]: (reached.get(plan["name"] + ": step"), (plan.get("draw") or {}).get("clock_mhz")) for plan in document["plans"]}
    return {name: pair for name, pair in found.items() if all(pair) and name in plans}


def by_clock(plans, measured, power):
    """Errors of steps whose computing is taken to the plan's clock."""
    for name, (rate, clock) in measured.items():
        tflops, step, calls = plans[name]
        more = sum(seconds * ((mhz / clock) ** power - 1) for mhz, seconds in calls if mhz > 0)
        yield tflops * step / (step + more) / rate - 1


def by_one(plans, measured, told):
    """Errors of the other steps, with the factor on computing by which the one named `told` is right."""
    def computing(name):
        return sum(seconds for _, seconds in plans[name][2])
    tflops, step, _ = plans[told]
    longer = (tflops / measured[told][0] - 1) * step / computing(told)
    for name, (rate, _) in measured.items():
        tflops, step, _ = plans[name]
        if name != told:
            yield tflops * step / (step + longer * computing(name)) / rate - 1


def tell(what, documents):
    mean = statistics.mean(statistics.mean(map(abs, errors)) for errors in documents)
    within = statistics.mean(statistics.mean(abs(e - statistics.mean(errors)) for e in errors) for errors in documents)
    print(f"{what}: mean {mean:.2%}, without the card's own {within:.2%}, worst {max(abs(e) for errors in documents for e in errors):.1%}, "
          f"{len(documents)} documents")


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    profile = str(pathlib.Path(sys.argv[2]).resolve()) if pathlib.Path(sys.argv[2]).is_file() else sys.argv[2]
    plans = priced(pathlib.Path(sys.argv[1]).resolve(), profile)
    documents = [measured_in(json.loads(pathlib.Path(path).read_text()), plans) for path in sys.argv[3:]]
    documents = [measured for measured in documents if len(measured) >= FEWEST]
    known = any(mhz > 0 for _, _, calls in plans.values() for mhz, _ in calls)
    for power in POWERS if known else POWERS[:1]:
        tell(f"power {power}", [list(by_clock(plans, measured, power)) for measured in documents])
    for name in plans:
        if any(name in measured for measured in documents):
            tell(f"by {name}", [list(by_one(plans, measured, name)) for measured in documents if name in measured])


main()
