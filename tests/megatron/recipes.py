"""Holds rows of profiles/runs to the recipes of a megatron-bridge wheel that they name, without installing it.

usage: recipes.py WHEEL [--runs FILE.csv]

A recipe is a function of megatron/bridge/perf_recipes or megatron/bridge/recipes. What it assigns to its configuration is
read from its source: constants, in the order of its statements, those of the recipes that it begins with first. What is
computed is left out, and said with --verbose. The exit status is 1 where a row and its recipe differ.
"""

import argparse
import ast
import csv
import pathlib
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = ROOT / "profiles/runs/megatron-bridge.csv"
UNKNOWN = object()

# A column of a row, the settings that say it (the first that the recipe assigns), and what they are without one.
COLUMNS = {
    "gbs": ["train.global_batch_size"], "mbs": ["train.micro_batch_size"], "seq_len": ["model.seq_length"],
    "tp": ["model.tensor_model_parallel_size"], "pp": ["model.pipeline_model_parallel_size"],
    "vpp": ["model.virtual_pipeline_model_parallel_size"], "cp": ["model.context_parallel_size"],
    "ep": ["model.expert_model_parallel_size"], "etp": ["model.expert_tensor_parallel_size"],
    "fsdp": ["ddp.use_megatron_fsdp"], "ep_overlap": ["comm_overlap.overlap_moe_expert_parallel_comm"],
    "recompute_modules": ["model.recompute_modules"], "offload_modules": ["model.offload_modules"],
    "dispatcher": ["model.moe_token_dispatcher_type"],
}  # fmt: skip
NUMBERS = ["gbs", "mbs", "seq_len", "tp", "pp", "vpp", "cp", "ep", "etp"]
FLAGS = ["fsdp", "ep_overlap"]


def dotted(node):
    """cfg.model.x as ["cfg", "model", "x"]; None for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and [*inner, node.attr]
    return None


def constant(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


class Wheel:
    def __init__(self, path):
        self.functions = {}
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".py") and ("/perf_recipes/" in name or "/recipes/" in name):
                    tree = ast.parse(archive.read(name))
                    names = {
                        alias.asname or alias.name: alias.name
                        for node in ast.walk(tree)
                        if isinstance(node, ast.ImportFrom)
                        for alias in node.names
                    }
                    for node in tree.body:
                        if isinstance(node, ast.FunctionDef):
                            self.functions.setdefault(node.name, []).append((name, node, names))

    def find(self, name):
        """The function of that name, that of the performance recipes first."""
        found = sorted(self.functions.get(name, []), key=lambda one: "/perf_recipes/" not in one[0])
        return found[0] if found else None

    def settings(self, name, depth=0):
        """What a recipe assigns, by names such as model.tensor_model_parallel_size."""
        found = self.find(name)
        if found is None or depth > 12:
            return {}
        _, function, names = found
        values = {}
        for statement in function.body:
            self.follow(statement, values, names, depth, name)
        return values

    def follow(self, statement, values, names, depth, own):
        if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            for node in ast.walk(statement):  # it may or may not be assigned
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        path = dotted(target)
                        if path and path[0] == "cfg":
                            values[".".join(path[1:])] = UNKNOWN
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call, found = statement.value, dotted(statement.value.func)
            helper = self.find(names.get(found[0], found[0])) if found and len(found) == 1 else None
            if helper and call.args and dotted(call.args[0]) == ["cfg"] and depth < 12:
                for inner in helper[1].body:  # a helper that sets what it is given
                    self.follow(inner, values, helper[2], depth + 1, helper[1].name)
            return
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
                self.begin(statement.value, values, names, depth, own)
            return
        path = dotted(statement.targets[0])
        if not path:
            return
        if path == ["cfg"] and isinstance(statement.value, ast.Call):
            self.begin(statement.value, values, names, depth, own)
        elif path[0] == "cfg" and isinstance(statement.value, ast.Call):
            section = ".".join(path[1:])
            for key in [key for key in values if key.startswith(section + ".")]:
                del values[key]
            values[section] = UNKNOWN
            for word in statement.value.keywords:
                if word.arg:
                    values[f"{section}.{word.arg}"] = constant(word.value)
        elif path[0] == "cfg":
            values[".".join(path[1:])] = constant(statement.value)

    def begin(self, call, values, names, depth, own):
        name = dotted(call.func)
        if name and len(name) == 1:
            target = names.get(name[0], name[0])
            inner = call.args[0] if call.args and isinstance(call.args[0], ast.Call) else None
            if inner is not None:  # _with_global_batch_size(recipe(), 1024)
                self.begin(inner, values, names, depth, own)
                if target == "_with_global_batch_size" and len(call.args) > 1:
                    values["train.global_batch_size"] = constant(call.args[1])
            elif target != own or names.get(name[0]):
                values.update(self.settings(target, depth + 1))


def modules(text):
    return sorted(word for word in text.replace("+", " ").replace(";", " ").replace(",", " ").split() if word)


def said(column, values):
    """The column's value by the recipe; UNKNOWN where it does not say one."""
    for name in COLUMNS[column]:
        if name in values and values[name] is not UNKNOWN:
            value = values[name]
            if column == "recompute_modules" and values.get("model.recompute_granularity", UNKNOWN) is None:
                return []
            if column == "dispatcher" and value == "flex":
                return values.get("model.moe_flex_dispatcher_backend", UNKNOWN)
            return value
    return UNKNOWN


def differs(column, cell, value):
    if column in NUMBERS:
        return int(cell or 1) != (value or 1)
    if column in FLAGS:
        return (cell == "1") != bool(value)
    if column in ("recompute_modules", "offload_modules"):
        return ([] if cell.startswith("none") else modules(cell)) != sorted(value or [])
    return cell != str(value)


def check(wheel, row, verbose):
    """Lines that say where the row and its recipe differ; None where the wheel has no such recipe."""
    name = row["recipe_ref"].split(":")[-1].split("(")[0].strip()
    if wheel.find(name) is None:
        return None
    values, lines = wheel.settings(name), []
    for column in COLUMNS:
        value = said(column, values)
        if value is UNKNOWN:
            if verbose:
                lines.append(f"  {column}: {name} assigns no constant")
        elif row[column] and differs(column, row[column], value):
            lines.append(f"  {column}: row {row[column]}, recipe {value}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel")
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    wheel = Wheel(options.wheel)
    held = differing = 0
    with open(options.runs, newline="") as file:
        for row in csv.DictReader(file):
            lines = check(wheel, row, options.verbose)
            if lines is None:
                continue
            held += 1
            if lines:
                differing += 1
                print(f"{row['run_id']}: {row['recipe_ref']}", *lines, sep="\n")
    print(f"{held} rows have their recipe in the wheel; {differing} differ from it")
    return 0 if options.verbose or differing == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
