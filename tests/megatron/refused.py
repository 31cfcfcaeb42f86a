"""Holds the plans that `moe-plan launch` refuses by a rule to who asserts that rule: the installed megatron-core, or others.

usage: refused.py MOE_PLAN [--count N] [--seed S] [--transformer-engine V]

Random plans of real models are written as plan.json until N of them are refused by a rule that Megatron-Core's classes
assert. Each of these must be refused by a class of the package too, to which its words go without our rules. A plan that
breaks rules of validate_args only must be refused there. Every other rule that refused a plan is asserted elsewhere: it
is printed with its source, which must name a file, and where the file is the package's own it must be there. The exit
status is 1 where one of this does not hold, and 77 without the package.
"""

import argparse
import collections
import logging
import os
import pathlib
import random
import re
import sys
import tempfile

import agree
import arguments as parser_of_megatron
import launched
import mapping
import oracle
import plans
import rules

# The fewest rules of the classes that N = 100 plans must have been refused by.
DISTINCT = 15


def rule_of(refusal, stated):
    """The rule whose message stands in the line that refuses a plan; None where the plan is refused for another cause."""
    return next((rule for rule in stated if f"{rule['message']} ({rule['source']})" in refusal), None)


def words_of(plan, words):
    """The plan's words with the facts of its model; plans.py's models differ from the profiles in layers, biases and MTP."""
    config = plan["model"]
    facts = plans.MODELS[launched.MODELS[config["name"]]]
    layers = config["num_hidden_layers"]
    changed = {"model.layers": str(layers), "model.mtp": str(config.get("num_nextn_predict_layers", 0))}
    if config.get("attention_bias") and facts["model.bias"] == "none":
        changed.update({"model.attention_bias": "on", "model.bias": "qkv"})
    if facts["model.experts"] == "0":
        changed["model.dense_layers"] = str(layers)
    for field in ("model.moe_layers", "model.linear_layers"):
        if field in facts:
            changed[field] = (facts[field] + facts[field][-4:] * layers)[:layers]
    return plans.derived({**plans.PLAIN, **facts, **changed, **words})


def missing_source(rule, package):
    """What is wrong with the source of a rule that no class asserts; None where nothing is."""
    files = re.findall(r"[\w/.-]+\.(?:py|md)\b", rule["source"])
    if not files:
        return "its source names no file"
    if not re.match(r"megatron-core [\d., and]*0\.19", rule["source"]):
        return None  # A file of another release, or of another package.
    absent = [file for file in files if file.startswith("megatron/") and not (package / file).is_file()]
    return f"the package has no {', '.join(absent)}" if absent and "bridge" not in absent[0] else None


def main():
    parser = argparse.ArgumentParser(description="Plans that our rules refuse, against who asserts the rules.")
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MOE_PLAN_SEED", "1")))
    parser.add_argument("--transformer-engine", default="2.17")
    asked = parser.parse_args()
    known = oracle.load(asked.transformer_engine)
    logging.disable(logging.WARNING)
    import megatron.core

    package = pathlib.Path(megatron.core.__file__).resolve().parents[2]
    stacks, release = launched.stacks_of(oracle.installed())
    if not stacks:
        print(f"skipped: no stack is of megatron-core {oracle.installed()}")
        return oracle.SKIPPED
    engine, stated = mapping.load(), [rule for rule in rules.load()["rules"] if rules.in_force(rule, release)]
    generator = random.Random(asked.seed)
    counts, elsewhere, wrong = collections.Counter(), collections.Counter(), 0
    by_class, models, machines = 0, set(), set()

    def fault(said, plan, words):
        nonlocal wrong
        wrong += 1
        different = {field: word for field, word in words.items() if plans.PLAIN.get(field) != word}
        print(f"{said}\n  {plan['model']['name']} on {plan['hardware']['name']}: {different}")

    with tempfile.TemporaryDirectory() as folder:
        launcher = launched.Launcher(os.path.abspath(asked.program), pathlib.Path(folder))
        while by_class < asked.count:
            plan, words = launched.document(generator, stacks)
            _, refusal = launcher.launch(plan, "--megatron-core")
            rule = rule_of(refusal, stated) if refusal else None
            counts["plans"] += 1
            if counts["plans"] > 200 * asked.count:
                print(f"few plans are refused by a rule of the classes: {by_class} of {counts['plans']}")
                return 1
            if rule is None:
                continue
            said = words_of(plan, words)
            broken = rules.broken_rules(stated, said, release)
            if rule["name"] not in [one["name"] for one in broken]:
                fault(f"moe-plan refuses by '{rule['name']}', rules.py by {[one['name'] for one in broken]}", plan, words)
                continue
            asserted_by = {one["asserted_by"] for one in broken}
            try:
                if "class" in asserted_by:
                    refused = agree.refused_by(known, agree.documents(engine, said, release))
                elif "arguments" in asserted_by:
                    given = mapping.arguments(engine, said, release) + agree.WITHOUT_DATA
                    environment = mapping.environment(engine, said, release)
                    refused = parser_of_megatron.check(
                        said["hardware.generation"], given, plan["mesh"]["gpus"], environment
                    )
                else:
                    elsewhere.update(one["name"] for one in broken)
                    continue
            except ValueError:
                elsewhere.update(one["name"] for one in broken)
                continue  # Megatron-Core has no word for the plan, which is a refusal of its own.
            if not refused:
                fault(f"the package takes what breaks {[one['name'] for one in broken]}", plan, words)
            if "class" in asserted_by:
                by_class += 1
                models.add(plan["model"]["name"])
                machines.add(plan["hardware"]["name"])
                counts.update(one["name"] for one in broken if one["asserted_by"] == "class")
            else:
                counts["arguments"] += 1
    for rule in stated:
        missing = missing_source(rule, package) if rule["asserted_by"] != "class" else None
        if missing:
            wrong += 1
            print(f"rule '{rule['name']}': {missing}: {rule['source']}")
    distinct = [rule["name"] for rule in stated if rule["asserted_by"] == "class" and counts[rule["name"]]]
    print(
        f"megatron-core {oracle.installed()} as {', '.join(stacks)} ({release}), seed {asked.seed}: {by_class} plans of "
        f"{len(models)} models on {len(machines)} machines break {len(distinct)} rules of its classes, "
        f"{counts['arguments']} rules of its arguments only; {wrong} faults"
    )
    for rule in stated:
        if elsewhere[rule["name"]]:
            print(f"  {elsewhere[rule['name']]:4d} by {rule['asserted_by']}: {rule['name']} ({rule['source']})")
    few = asked.count >= 100 and (len(distinct) < DISTINCT or len(models) < 6 or len(machines) < 5)
    return 1 if wrong or few else 0


if __name__ == "__main__":
    sys.exit(main())
