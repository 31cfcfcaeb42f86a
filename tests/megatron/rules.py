"""Reads the rules of an engine and says which of them a plan breaks; the language is described in the data file."""

import json
import pathlib

PROFILES = pathlib.Path(__file__).resolve().parents[2] / "profiles"

# The words that `partial` stands for, beside which a set of graphs is its words.
PARTIAL = {"attn", "mlp", "moe_router", "moe_preprocess", "shared_experts"}


def load(name="megatron-core"):
    return json.loads((PROFILES / "stacks" / "rules" / f"{name}.json").read_text())


def version(text):
    return tuple(int(part) for part in text.split("."))


def in_force(entry, release):
    """Whether a rule or an entry of the mapping holds for a release."""
    at = version(release)
    if "from" in entry and at < version(entry["from"]):
        return False
    return "until" not in entry or at < version(entry["until"])


def modules(word):
    if word == "none":
        return set()
    return PARTIAL if word == "partial" else set(word.split("+"))


def number(word):
    try:
        return float(word)
    except ValueError:
        return None


def holds(word, test):
    """Whether the word of a field passes a test."""
    if isinstance(test, list):
        return any(holds(word, one) for one in test)
    if isinstance(test, dict):
        return all(holds(word, one) for one in test["all"])
    if test.startswith("+"):
        return test[1:] in modules(word)
    if test.startswith("-"):
        return test[1:] not in modules(word)
    for sign in ("!=", ">=", "<=", ">", "<"):
        if test.startswith(sign) and number(test[len(sign) :]) is not None:
            left, right = number(word), number(test[len(sign) :])
            if left is None:
                return sign == "!="
            return {
                "!=": left != right,
                ">=": left >= right,
                "<=": left <= right,
                ">": left > right,
                "<": left < right,
            }[sign]
    if test.startswith("!"):
        return word != test[1:]
    return word == test


def all_hold(plan, tests):
    return all(holds(plan[field], test) for field, test in tests.items())


def broken(rule, plan):
    if not all_hold(plan, rule["when"]):
        return False
    if "needs" in rule:
        return not all_hold(plan, rule["needs"])
    return all_hold(plan, rule["excludes"])


def broken_rules(rules, plan, release, asserted_by=None):
    """The rules of a release that a plan, a dictionary of words by field and fact, breaks."""
    return [
        rule
        for rule in rules
        if in_force(rule, release)
        and (asserted_by is None or rule["asserted_by"] in asserted_by)
        and broken(rule, plan)
    ]
