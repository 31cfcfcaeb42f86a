#!/usr/bin/env python3
"""Holds the pages of docs/reference about files to what they describe: the schemas, the plan's fields, the columns.

    MOE_PLAN=build/tools/moe-plan tests/schemas/reference_test.py
"""
import json
import os
import pathlib
import re
import subprocess
import sys

from suite import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
PAGES = ["documents.md", "plan.md", "csv.md", "checkpoints.md"]


def section(page, title):
    """The text of a page from a heading of the second level to the next."""
    text = (REFERENCE / page).read_text()
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"{page}: no section {title}"
    return rest.partition("\n## ")[0]


def cells(text):
    """Rows of the tables of a text, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    return [row for i, row in enumerate(rows)
            if not row[0].startswith("---") and not (i + 1 < len(rows) and rows[i + 1][0].startswith("---"))]


def plan_fields():
    """Paths of the fields of plan.json, documents inside of it left out, with their names on --fix."""
    found = {}

    def walk(schema, path):
        for name, value in schema["properties"].items():
            here = f"{path}.{name}" if path else name
            found[here] = value.get("x-fix")
            if value.get("type") == "object":
                walk(value, here)

    walk(json.loads((ROOT / "docs/schemas/plan.json").read_text()), "")
    return found


def test_tables_are_those_of_the_schemas():
    done = subprocess.run([sys.executable, ROOT / "docs/schemas/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fields_of_the_command_are_those_of_the_plan():
    """The program lists the names of --fix where it is given another one."""
    done = subprocess.run([os.environ["MOE_PLAN"], *"search --model tiny-qwen3-moe --hardware cpu-local --gpus 1 --gbs 1 --seq 64 --fix "
                           "nosuchfield=1".split()], capture_output=True, text=True)
    known = re.search(r"known are (.*)", done.stderr)
    assert done.returncode == 2 and known, done.stderr
    listed, schema = set(known[1].split(", ")), {fix for fix in plan_fields().values() if fix}
    assert listed == schema, f"--fix and docs/schemas/plan.json differ: {sorted(listed ^ schema)}"


def test_fields_of_the_reader_are_those_of_the_schema():
    """Every name that the reader of plan.json knows stands in the schema, and no other."""
    source = (ROOT / "planner/plan/plan_json.cpp").read_text()
    read = {word for names in re.findall(r"\.only\(\{(.*?)\}\)", source, re.S) for word in re.findall(r'"(\w+)"', names)}
    written = {path.rpartition(".")[2] for path in plan_fields()}
    assert read == written, f"plan_json.cpp and docs/schemas/plan.json differ: {sorted(read ^ written)}"


def test_every_choice_has_its_word_in_megatron():
    """A field that search can set, and the workload, stand in the table of Megatron's names."""
    named = {name for row in cells(section("plan.md", "The same choices in Megatron")) for name in re.findall(r"`([\w.]+)`", row[0])}
    fields = plan_fields()
    wanted = {path for path, fix in fields.items() if fix} | {"workload.seq", "workload.gbs", "mesh.edp", "model"}
    missing = wanted - named
    assert not missing, f"plan.md: no word of Megatron's for {sorted(missing)}"
    unknown = {name for name in named if name.partition(".")[0] in fields and name not in fields}
    assert not unknown, f"plan.md: no such field: {sorted(unknown)}"


def test_columns_of_runs_are_those_of_the_reader():
    source = (ROOT / "simulator/published/runs.cpp").read_text()
    read = re.findall(r'\{"(\w+)", (true|false), \w+\(', source)
    page = [(row[0].strip("`"), "true" if row[1] == "yes" else "false") for row in cells(section("csv.md", "Runs"))]
    assert len(read) > 20 and page == read, f"csv.md and runs.cpp differ: {sorted(set(page) ^ set(read))}"


def test_links_lead_somewhere():
    """Within docs/reference and to the schemas; headings are those of GitHub."""
    others = {"verbs.md", "profiles.md"}  # pages that this test does not know the headings of
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", (REFERENCE / page).read_text()):
            if link.startswith("https://") or link in others:
                continue
            file, _, heading = link.partition("#")
            path = (REFERENCE / file).resolve() if file else REFERENCE / page
            assert path.exists(), f"{page}: {link}: no such file"
            headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", path.read_text(), re.M)} if heading else set()
            assert not heading or heading in headings, f"{page}: {link}: no such heading"


if __name__ == "__main__":
    sys.exit(run([value for name, value in list(globals().items()) if name.startswith("test_")]))
