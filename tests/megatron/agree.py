"""Holds the rules that Megatron-Core's configuration classes assert to the installed megatron-core, on random plans.

usage: agree.py [--count N] [--seed S] [--release R] [--transformer-engine V] [--write FILE.json] [--arguments]
       agree.py --held [--transformer-engine V]

With --arguments the plans are passed to Megatron-LM's parse_args and validate_args instead (0.17 or later), and held to
the rules whose asserted_by is `arguments`. Every plan must be constructed exactly where it breaks no rule whose asserted_by is `class`. Printed are the plans where
that is not so, and for every such rule how many plans break it and how many break it alone. --write keeps the verdicts.
--held constructs the plans of the committed verdicts of the installed release: what the package says must be what is kept.
The exit status is 1 where one plan disagrees, and 77 without the package.
"""

import argparse
import collections
import json
import pathlib
import random
import sys

import arguments as parser_of_megatron
import mapping
import oracle
import plans
import rules

# What a run without data and a learning rate of its own needs besides.
WITHOUT_DATA = "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --min-lr 1e-5".split()


def documents(engine, plan, release):
    name, kwargs = mapping.keywords(engine, plan, release)
    yield {"class": name, "kwargs": kwargs}
    for part, other in (("optimizer", "OptimizerConfig"), ("ddp", "DistributedDataParallelConfig")):
        yield {"class": other, "kwargs": mapping.keywords(engine, plan, release, part)[1]}


def refused_by(known, asked):
    return next((v for v in (oracle.verdict(known, document) for document in asked) if v), None)


def held(known, engine):
    """Compares the committed verdicts of the installed release with the package; the exit status."""
    minor = rules.version(oracle.installed())[:2]
    folder, differ, count = pathlib.Path(__file__).parent / "verdicts", 0, 0
    for file in sorted(folder.glob("*.json")):
        kept = json.loads(file.read_text())
        if rules.version(kept["release"]) != (*minor, 0):
            continue
        for one in kept["plans"]:
            plan = plans.plan_of(one["model"], one["differs"])
            refused = refused_by(known, documents(engine, plan, kept["release"]))
            count += 1
            if bool(refused) != one["refused"]:
                differ += 1
                print(f"{file.name}: {one['model']} {json.dumps(one['differs'])}: {refused or 'constructed'}")
    if not count:
        print(f"skipped: no verdicts of megatron-core {oracle.installed()} are kept")
        return oracle.SKIPPED
    print(f"megatron-core {oracle.installed()}: {count} committed verdicts, {differ} differ")
    return 1 if differ else 0


def main():
    parser = argparse.ArgumentParser(description="Rules against the installed megatron-core.")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--release")
    parser.add_argument("--transformer-engine", default="2.17")
    parser.add_argument("--write")
    parser.add_argument("--arguments", action="store_true")
    parser.add_argument("--held", action="store_true")
    arguments = parser.parse_args()
    known = oracle.load(arguments.transformer_engine)
    if arguments.held:
        return held(known, mapping.load())
    installed = oracle.installed()
    release = arguments.release or installed
    engine, stated = mapping.load(), rules.load()["rules"]
    where = "arguments" if arguments.arguments else "class"
    asserted = [rule for rule in stated if rule["asserted_by"] == where and rules.in_force(rule, release)]
    generator = random.Random(arguments.seed)
    absent = [rule for rule in stated if rule["kind"] == "absent" and rules.in_force(rule, release)]
    count, alone, disagree, kept = collections.Counter(), collections.Counter(), 0, []
    while len(kept) < arguments.count:
        name, changed = plans.random_plan(generator)
        plan = plans.plan_of(name, changed)
        if any(rules.broken(rule, plan) for rule in absent):
            continue  # The release lacks a setting that the plan asks for, so that nothing can be written.
        try:
            if arguments.arguments:
                words = mapping.arguments(engine, plan, release) + WITHOUT_DATA
            else:
                asked = list(documents(engine, plan, release))
        except ValueError:
            continue  # The release cannot say the plan.
        found = rules.broken_rules(asserted, plan, release)
        if arguments.arguments:
            gpus = int(plan["tp"]) * int(plan["cp"]) * int(plan["pp"]) * int(plan["dp"])
            environment = mapping.environment(engine, plan, release)
            refused = parser_of_megatron.check(plan["hardware.generation"], words, gpus, environment)
        else:
            refused = refused_by(known, asked)
        for rule in found:
            count[rule["name"]] += 1
            alone[rule["name"]] += len(found) == 1
        count["no rule"] += not found
        kept.append(
            {"model": name, "differs": changed, "refused": bool(refused), "rules": [rule["name"] for rule in found]}
        )
        if bool(found) != bool(refused):
            disagree += 1
            if disagree <= 20:
                print(f"disagree: {name} {json.dumps(changed)}")
                print(f"  megatron-core: {refused or 'constructed'}")
                print(f"  rules: {[rule['name'] for rule in found] or 'none broken'}")
    print(
        f"megatron-core {installed} as {release}: {arguments.count} plans, {count['no rule']} legal, {disagree} disagree"
    )
    for rule in asserted:
        print(f"  {count[rule['name']]:5d} {alone[rule['name']]:5d} alone  {rule['name']}")
    if arguments.write:
        with open(arguments.write, "w", encoding="utf-8") as file:
            file.write(json.dumps({"release": release, "installed": installed, "plans": kept}, separators=(",", ":")))
    return 1 if disagree else 0


if __name__ == "__main__":
    sys.exit(main())
