"""Holds the rules that Megatron-Core's configuration classes assert to the installed megatron-core, on random plans.

usage: agree.py [--count N] [--seed S] [--release R] [--transformer-engine V] [--write FILE.json]

Every plan must be constructed exactly where it breaks no rule whose asserted_by is `class`. Printed are the plans where
that is not so, and for every such rule how many plans break it and how many break it alone. --write keeps the verdicts.
The exit status is 1 where one plan disagrees, and 77 without the package.
"""

import argparse
import collections
import json
import random
import sys

import mapping
import oracle
import plans
import rules


def documents(engine, plan, release):
    name, kwargs = mapping.keywords(engine, plan, release)
    yield {"class": name, "kwargs": kwargs}
    for part, other in (("optimizer", "OptimizerConfig"), ("ddp", "DistributedDataParallelConfig")):
        yield {"class": other, "kwargs": mapping.keywords(engine, plan, release, part)[1]}


def main():
    parser = argparse.ArgumentParser(description="Rules against the installed megatron-core.")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--release")
    parser.add_argument("--transformer-engine", default="2.17")
    parser.add_argument("--write")
    arguments = parser.parse_args()
    known = oracle.load(arguments.transformer_engine)
    from megatron.core import __version__ as installed

    release = arguments.release or installed
    engine, stated = mapping.load(), rules.load()["rules"]
    asserted = [rule for rule in stated if rule["asserted_by"] == "class" and rules.in_force(rule, release)]
    generator = random.Random(arguments.seed)
    absent = [rule for rule in stated if rule["kind"] == "absent" and rules.in_force(rule, release)]
    count, alone, disagree, kept = collections.Counter(), collections.Counter(), 0, []
    while len(kept) < arguments.count:
        name, changed = plans.random_plan(generator)
        plan = plans.plan_of(name, changed)
        if any(rules.broken(rule, plan) for rule in absent):
            continue  # The release lacks a setting that the plan asks for, so that nothing can be written.
        try:
            asked = list(documents(engine, plan, release))
        except ValueError:
            continue  # The release cannot say the model.
        found = rules.broken_rules(asserted, plan, release)
        refused = next((v for v in (oracle.verdict(known, d) for d in asked) if v), None)
        for rule in found:
            count[rule["name"]] += 1
            alone[rule["name"]] += len(found) == 1
        count["no rule"] += not found
        kept.append({"model": name, "differs": changed, "refused": bool(refused), "rules": [rule["name"] for rule in found]})
        if bool(found) != bool(refused):
            disagree += 1
            if disagree <= 20:
                print(f"disagree: {name} {json.dumps(changed)}")
                print(f"  megatron-core: {refused or 'constructed'}")
                print(f"  rules: {[rule['name'] for rule in found] or 'none broken'}")
    print(f"megatron-core {installed} as {release}: {arguments.count} plans, {count['no rule']} legal, {disagree} disagree")
    for rule in asserted:
        print(f"  {count[rule['name']]:5d} {alone[rule['name']]:5d} alone  {rule['name']}")
    if arguments.write:
        with open(arguments.write, "w", encoding="utf-8") as file:
            file.write(json.dumps({"release": release, "installed": installed, "plans": kept}, separators=(",", ":")))
    return 1 if disagree else 0


if __name__ == "__main__":
    sys.exit(main())
