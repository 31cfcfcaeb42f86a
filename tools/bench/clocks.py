#!/usr/bin/env python3
"""What the clock of a card at the limit of its power follows from, over the steps that tools/gpu-check measured.

    tools/bench/clocks.py [profiles/measured/*check.json]

Fits the watts of a step to its rates: a start, W per TFLOPS of BF16 and of blockwise FP8 (times the clock to a power, since voltage
rises with it), W of time in ops that move memory, W of time in attention. The clock at which that is what the cards held is then
compared with the one that was measured, each document's by a fit to the others. Steps with recomputation or copies to the host are left
out: their rate is not that of their products. Then, of the same plans in several documents, by what power of the clock op kinds became
longer from card to card.
"""
import glob
import json
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP_MHZ = 1980.0
POWERS = [0.25 * i for i in range(13)]


def steps_of(path):
    document = json.loads(pathlib.Path(path).read_text())
    reached = {row["name"]: row["reference"] for row in document["rows"]}
    for plan in document.get("plans", []):
        draw, name = plan.get("draw") or {}, plan["name"]
        if "clock_mhz" not in draw or "offload" in name or "recompute" in name:
            continue
        whole = sum(kind["measured_seconds"] for kind in plan["by_kind"])

        def share(says):
            return sum(kind["measured_seconds"] for kind in plan["by_kind"] if says(kind["kind"])) / whole
        yield {"document": path, "name": name, "watts": draw["watts"], "clock": draw["clock_mhz"] / TOP_MHZ,
               "rate": reached[name + ": step"] / 1000, "fp8": name.endswith("fp8-blockwise"),
               "attention": share(lambda kind: "attention" in kind),
               "moves": share(lambda kind: "attention" not in kind and "gemm" not in kind)}


def terms(step, power, clock):
    """At another clock what computes takes longer, and what moves memory as long."""
    longer = (1 - step["moves"]) * step["clock"] / clock + step["moves"]
    rate = step["rate"] / longer * clock ** power
    return [1.0, rate * (not step["fp8"]), rate * step["fp8"], step["moves"] / longer,
            step["attention"] * step["clock"] / clock / longer]


def solved(a, b):
    n = len(b)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(a[r][i]))
        a[i], a[pivot], b[i], b[pivot] = a[pivot], a[i], b[pivot], b[i]
        for r in range(i + 1, n):
            factor = a[r][i] / a[i][i]
            a[r] = [x - factor * y for x, y in zip(a[r], a[i])]
            b[r] -= factor * b[i]
    for i in reversed(range(n)):
        b[i] = (b[i] - sum(a[i][j] * b[j] for j in range(i + 1, n))) / a[i][i]
    return b


def fitted(steps):
    best = None
    for power in POWERS:
        rows = [terms(step, power, step["clock"]) for step in steps]
        watts = [step["watts"] for step in steps]
        normal = [[sum(x[i] * x[j] for x in rows) for j in range(5)] for i in range(5)]
        found = solved(normal, [sum(x[i] * w for x, w in zip(rows, watts)) for i in range(5)])
        off = sum((sum(c * t for c, t in zip(found, x)) - w) ** 2 for x, w in zip(rows, watts))
        if best is None or off < best[0]:
            best = off, power, found
    return math.sqrt(best[0] / len(steps)), best[1], best[2]


def clock_of(step, power, found, limit):
    def watts(clock):
        return sum(c * t for c, t in zip(found, terms(step, power, clock)))
    return max((c / 500 for c in range(250, 501) if watts(c / 500) <= limit), default=0.5)


def powers_of(paths):
    """By op kind the slope of the logarithm of its seconds over that of the clock, within plans, and the kind's seconds of all of them."""
    found = {}
    for path in paths:
        for plan in json.loads(pathlib.Path(path).read_text()).get("plans", []):
            clock = (plan.get("draw") or {}).get("clock_mhz")
            for kind in plan["by_kind"] if clock else []:
                found.setdefault((plan["name"], kind["kind"]), []).append((math.log(clock), kind["measured_seconds"]))
    sums = {}
    for (_, kind), seen in found.items():
        seconds = [s for _, s in seen]
        if len(seen) < 4 or max(seconds) > 1.25 * min(seconds):  # too few, or its kernels changed
            continue
        middle, logs = statistics.mean(clock for clock, _ in seen), [math.log(s) for s in seconds]
        total = sums.setdefault(kind, [0.0, 0.0, 0.0])
        total[0] += sum(s * (clock - middle) ** 2 for clock, s in seen)
        total[1] += sum(s * (clock - middle) * (log - statistics.mean(logs)) for (clock, s), log in zip(seen, logs))
        total[2] += statistics.mean(seconds)
    return sorted(((total[2], kind, total[1] / total[0]) for kind, total in sums.items() if total[0] > 0), reverse=True)


def main():
    paths = sys.argv[1:] or sorted(glob.glob(str(ROOT / "profiles/measured/h[12]00-*check.json")))
    steps = [step for path in paths for step in steps_of(path)]
    held = statistics.mean(step["watts"] for step in steps if step["clock"] < 0.98)
    off, power, found = fitted(steps)
    print(f"{len(steps)} steps of {len({step['document'] for step in steps})} documents; cards below their top clock drew {held:.0f} W")
    print("W: start {:.0f}; per PFLOPS of BF16 {:.0f}, of FP8 {:.0f}; in ops that move memory {:.0f}, in attention {:.0f}".format(*found)
          + f"; rates times clock^{power:g}; off by {off:.0f} W")
    errors = []
    for step in steps:
        _, power, found = fitted([other for other in steps if other["document"] != step["document"]])
        errors.append((clock_of(step, power, found, held) / step["clock"] - 1, step))
    worst, step = max(errors, key=lambda error: abs(error[0]))
    usual = statistics.mean(step["clock"] for step in steps)
    alone = math.sqrt(statistics.mean((usual / step["clock"] - 1) ** 2 for step in steps))
    print(f"clocks by the other documents: root mean square {math.sqrt(statistics.mean(e * e for e, _ in errors)):.1%}, worst {worst:+.1%} "
          f"({step['name']}); by one clock for all {alone:.1%}")
    print("seconds go with the clock, between cards, to the power of: "
          + ", ".join(f"{kind} {slope:+.2f}" for _, kind, slope in powers_of(paths)[:8]))


main()
