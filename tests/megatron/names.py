"""Looks up every name of profiles/engines/megatron-core.json in wheels of megatron-core and megatron-bridge.

usage: names.py WHEEL.. [--bridge WHEEL]

The wheels are read as text, so that neither PyTorch nor the packages need to be installed. For each wheel of
megatron-core the keyword arguments that an entry gives for its release must be fields of the class; where the wheel
holds megatron/training (since 0.17), the arguments must be flags of its parser. A wheel of megatron-bridge is checked
with the last of them. The exit status is 1 where a name is missing.
"""

import argparse
import ast
import re
import sys
import zipfile

import mapping
from rules import in_force, version


def trees(wheel, under):
    for name in wheel.namelist():
        if name.startswith(under) and name.endswith(".py"):
            try:
                yield name, ast.parse(wheel.read(name))
            except SyntaxError:
                continue


def class_fields(wheel, under):
    """Annotated names of every class: {class: set}, classes of one name together, and the names of their bases."""
    fields, bases, functions = {}, {}, set()
    for _, tree in trees(wheel, under):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            if not isinstance(node, ast.ClassDef):
                continue
            own = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            fields.setdefault(node.name, set()).update(own)
            bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    return fields, bases, functions


def with_bases(name, fields, bases, seen=None):
    seen = seen or set()
    if name in seen:
        return set()
    seen.add(name)
    result = set(fields.get(name, ()))
    for base in bases.get(name, ()):
        result |= with_bases(base, fields, bases, seen)
    return result


def flags(wheel):
    """Flags of Megatron-LM's parser: those that its source spells and those made from the fields of classes."""
    source = wheel.read("megatron/training/arguments.py").decode()
    spelled = set(re.findall(r"""['"](--[a-z0-9][a-zA-Z0-9-]*)['"]""", source))
    made = set()
    excluded = set(re.findall(r'^        "([a-zA-Z0-9_]+)",', source[: source.index("transformer_factory =")], re.M))
    for under in ("megatron/core/", "megatron/training/"):
        for _, tree in trees(wheel, under):
            for node in ast.walk(tree):
                if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                    continue
                for one in node.body:
                    if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                        continue
                    text = ast.unparse(one)
                    named = re.findall(r"""['"](--[a-z0-9-]+)['"]""", text)
                    made.update(named)
                    if named or one.target.id in excluded:
                        continue
                    name = one.target.id.replace("_", "-")
                    made.update((f"--no-{name}", f"--disable-{name}") if text.endswith("= True") else (f"--{name}",))
    return spelled | made


def release_of(path):
    return re.search(r"megatron_(?:core|bridge)-([0-9.]+)-", path).group(1).rstrip(".")


def check_core(path, engine):
    missing, checked = [], 0
    with zipfile.ZipFile(path) as wheel:
        release = release_of(path)
        fields, bases, _ = class_fields(wheel, "megatron/core/")
        known = {
            "kwargs": with_bases("MLATransformerConfig", fields, bases)
            | with_bases("TransformerConfig", fields, bases),
            "optimizer": with_bases("OptimizerConfig", fields, bases),
            "ddp": with_bases("DistributedDataParallelConfig", fields, bases),
        }
        has_flags = "megatron/training/arguments.py" in wheel.namelist()
        spelled = flags(wheel) if has_flags else set()
        for entry in engine["fields"] + engine["implied"]:
            if not in_force(entry, release) or "refuse" in entry:
                continue
            where = entry.get("field", "implied")
            for part, names in known.items():
                for name in entry.get(part, {}):
                    checked += 1
                    if name not in names:
                        missing.append(f"{release} {where}: {name} is no field ({part})")
            for flag in entry.get("args", []) if has_flags else []:
                if flag.startswith("--"):
                    checked += 1
                    if flag not in spelled:
                        missing.append(f"{release} {where}: {flag} is no argument")
    return missing, checked


def check_bridge(path, core_path, engine):
    missing, checked = [], 0
    with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(core_path) as core:
        release = release_of(core_path)
        fields, bases, functions = class_fields(wheel, "megatron/bridge/")
        for under in ("megatron/core/", "megatron/training/"):
            more, parents, _ = class_fields(core, under)
            for name in more:
                fields.setdefault(name, set()).update(more[name])
                bases.setdefault(name, set()).update(parents[name] - {name})
        sections = {
            "model": ("GPTModelProvider", "MLAModelProvider", "HybridModelProvider", "TransformerConfig", "MLATransformerConfig"),
            "ddp": ("DistributedDataParallelConfig",),
            "optimizer": ("OptimizerConfig",),
            "train": ("TrainingConfig",),
            "dist": ("DistributedInitConfig",),
            "comm_overlap": ("CommOverlapConfig",),
            "mixed_precision": ("MixedPrecisionConfig",),
            "rerun_state_machine": ("RerunStateMachineConfig",),
            "tokenizer": ("TokenizerConfig",),
            "checkpoint": ("CheckpointConfig",),
            "dataset": ("GPTDatasetConfig", "DataloaderConfig"),
        }
        for entry in engine["fields"] + engine["implied"]:
            if not in_force(entry, release):
                continue
            for override, value in {**entry.get("provider", {}), **entry.get("bridge", {})}.items():
                checked += 1
                section, _, name = override.partition(".")
                if not name:
                    if value not in functions:
                        missing.append(f"bridge {release_of(path)}: {override} = {value} is no name there")
                elif not any(name in with_bases(one, fields, bases) for one in sections[section]):
                    missing.append(f"bridge {release_of(path)}: {override} is no field")
        bridge = release_of(path)
        for recipe in engine["recipes"]:
            if version(bridge) >= version(recipe["from"]):
                checked += 1
                if recipe["name"] not in exported(wheel):
                    missing.append(f"bridge {bridge}: {recipe['name']} is no recipe")
        precision = engine["mixed_precision"]
        for name in precision["fields"]:
            if version(bridge) >= version(precision.get("since", {}).get(name, "0")):
                checked += 1
                if name not in fields["MixedPrecisionConfig"]:
                    missing.append(f"bridge {bridge}: mixed_precision.{name} is no field")
    return missing, checked


def exported(wheel):
    """Names of recipes, the aliases of functions included."""
    text = "".join(
        wheel.read(name).decode() for name in wheel.namelist() if name.startswith("megatron/bridge/recipes/")
    )
    return set(re.findall(r"[a-z0-9_]+_pretrain_(?:[a-z0-9_]+_)?config", text))


def main():
    parser = argparse.ArgumentParser(description="Names of the mapping in wheels.")
    parser.add_argument("wheels", nargs="+")
    parser.add_argument("--bridge")
    arguments = parser.parse_args()
    engine = mapping.load()
    failed = False
    for path in arguments.wheels:
        missing, checked = check_core(path, engine)
        print(f"megatron-core {release_of(path)}: {checked} names, {len(missing)} missing")
        print("".join(f"  {line}\n" for line in missing), end="")
        failed = failed or bool(missing)
    if arguments.bridge:
        missing, checked = check_bridge(arguments.bridge, arguments.wheels[-1], engine)
        print(f"megatron-bridge {release_of(arguments.bridge)}: {checked} names, {len(missing)} missing")
        print("".join(f"  {line}\n" for line in missing), end="")
        failed = failed or bool(missing)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
