"""Translates a plan's words into the keyword arguments of Megatron-Core, by profiles/engines/megatron-core.json."""

import json

from rules import PROFILES, all_hold, in_force, modules


def load(name="megatron-core"):
    return json.loads((PROFILES / "engines" / f"{name}.json").read_text())


def literal(word):
    """A word as the number that it is, or as text."""
    if not isinstance(word, str):
        return word
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def partial(plan):
    """Modules whose graphs `partial` means: those of static shapes that the model has."""
    words = ["attn"]
    if literal(plan["model.dense_layers"]) > 0 and plan["ep_overlap"] == "off":
        words.append("mlp")
    if literal(plan["model.experts"]) > 0:
        words.append("moe_router")
        drops = plan["expert_capacity"] != "none" and plan["pad_to_capacity"] == "off"
        if plan["derived.dispatcher"] != "alltoall" or not drops:
            words.append("moe_preprocess")
    return words


def value(entry, plan, text):
    """What a placeholder of an entry stands for; other values stand for themselves."""
    if isinstance(text, list):
        return [value(entry, plan, one) for one in text]
    if not isinstance(text, str) or not text.startswith("$"):
        return text
    word = plan[entry["field"]] if "field" in entry else None
    if text == "$value":
        return literal(word)
    if text == "$modules":
        known = entry["words"]
        return [known[module] for module in known if module in modules(word) and known[module]]
    if text == "$partial":
        return partial(plan)
    if text in ("$first", "$last"):
        first, last = word.split("+")
        return int(first if text == "$first" else last)
    return literal(plan[text[1:]])


def keywords(engine, plan, release, part="kwargs", implied=True):
    """Keyword arguments of one class (`kwargs`, `optimizer` or `ddp`), and the class's name."""
    result, name = {}, "TransformerConfig"
    entries = engine["fields"] + (engine["implied"] if implied else [])
    for entry in entries:
        if "field" in entry and entry["field"] not in plan:
            continue
        if not in_force(entry, release) or not all_hold(plan, entry.get("when", {})):
            continue
        if "refuse" in entry:
            raise ValueError(entry["refuse"])
        name = entry.get("class", name)
        for key, text in entry.get(part, {}).items():
            result[key] = value(entry, plan, text)
    return name, result


def arguments(engine, plan, release, implied=True):
    """Megatron-LM's arguments: of one that is given twice the later stands."""
    result = {}
    for entry in engine["fields"] + (engine["implied"] if implied else []):
        if "field" in entry and entry["field"] not in plan:
            continue
        if not in_force(entry, release) or not all_hold(plan, entry.get("when", {})):
            continue
        for key in ("refuse", "refuse_args"):
            if key in entry:
                raise ValueError(entry[key])
        flag = None
        for text in entry.get("args", []):
            if text.startswith("--"):
                flag = text
                result[flag] = []
                continue
            given = value(entry, plan, text)
            if entry.get("field") in ("model.moe_layers", "model.linear_layers", "model.gated_delta") and isinstance(
                given, list
            ):
                given = [str(given).replace(" ", "")]
            result[flag] += [str(one) for one in (given if isinstance(given, list) else [given])]
    return [word for flag, values in result.items() for word in (flag, *values)]


def environment(engine, plan, release):
    """The environment that goes with the arguments, but for what the machine's topology says."""
    result = {}
    for entry in engine["fields"] + engine["implied"]:
        if (
            ("field" not in entry or entry["field"] in plan)
            and in_force(entry, release)
            and all_hold(plan, entry.get("when", {}))
        ):
            result.update({name: text for name, text in entry.get("env", {}).items() if not text.startswith("$")})
    return result
