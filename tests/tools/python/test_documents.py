"""The dataclasses beside the schemas, their types, and their tables."""
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import moe_plan
from moe_plan import documents, tables

SOURCE = pathlib.Path(os.environ["SOURCE"])


def test_the_dataclasses_are_what_the_schemas_say():
    made = subprocess.run([sys.executable, SOURCE / "tools/python/make_documents.py", "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout


def test_a_schema_that_changes_changes_them(tmp_path):
    for name in ("docs/schemas", "tools/python/moe_plan"):
        (tmp_path / name).mkdir(parents=True)
        for file in [*(SOURCE / name).glob("*.json"), *(SOURCE / name).glob("doc*.py")]:
            (tmp_path / name / file.name).write_text(file.read_text())
    script = tmp_path / "tools/python/make_documents.py"
    script.write_text((SOURCE / "tools/python/make_documents.py").read_text())
    schema = tmp_path / "docs/schemas/search.json"
    schema.write_text(schema.read_text().replace('"evaluated"', '"priced"'))
    assert subprocess.run([sys.executable, script, "--check"], capture_output=True).returncode == 1
    subprocess.run([sys.executable, script], check=True)
    assert "    priced: int\n" in (tmp_path / "tools/python/moe_plan/documents.py").read_text()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="types of the package: no mypy")
def test_types_hold_to_mypy(tmp_path):
    package = pathlib.Path(moe_plan.__file__).parent
    use = tmp_path / "use.py"
    use.write_text("import moe_plan\n"
                   "found = moe_plan.search('m', 'h', gpus=1, gbs=1, seq=1)\n"
                   "reveal_type(found.plans[0].plan.mesh.tp)\n"
                   "reveal_type(moe_plan.show('stack', 's').release)\n"
                   "moe_plan.search('m', 'h', gpus=1, gbs=1)\n")
    strict = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path)]
    checked = subprocess.run([*strict, package], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    used = subprocess.run([*strict, use], capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(package.parent)}).stdout
    assert 'type is "int"' in used and 'type is "str"' in used
    assert 'Missing named argument "seq"' in used and "Found 1 error" in used


FOUND = moe_plan.search("tiny-qwen3-moe", "h100", gpus=8, gbs=64, seq=1024, precision="bf16",
                        fix={"tp": 2, "mbs": 1, "pp": 1, "ep": 8}, top=2)


def test_a_search_prints_as_a_table():
    text = repr(FOUND)
    assert text.startswith("Search\n") and "\nplans\n" in text
    head, first = text.split("\nplans\n")[1].splitlines()[:2]
    assert head.split()[:4] == ["TFLOPS/GPU", "step", "s", "GiB"]
    assert first.split()[0] == f"{FOUND.plans[0].tflops_per_gpu:.4g}"
    assert "interval" in head and "hours" not in head  # nothing stands in that column


def test_notebooks_get_html_with_all_escaped():
    page = FOUND._repr_html_()
    assert page.count("<table>") == page.count("</table>") == len(FOUND.tables())
    assert f"<td style=\"text-align: right\">{FOUND.evaluated:,}</td>" in page
    odd = tables.Table("<b>", ["a&b"], [["<script>"]])
    assert odd.html().count("<script>") == 0 and "&lt;script&gt;" in odd.html() and "&lt;b&gt;" in odd.html()


def test_cells_are_short_and_rows_are_counted():
    assert tables.shown(None) == "-" and tables.shown(True) == "yes" and tables.shown([]) == "none"
    assert tables.shown(1234567) == "1,234,567" and tables.shown(0.123456) == "0.1235"
    assert len(tables.shown("x" * 500)) == 80 and tables.shown("one\ntwo") == "one..."
    models = moe_plan.show("models")
    assert len(models.models) > tables.MOST_ROWS
    assert f"({len(models.models) - tables.MOST_ROWS} more rows)" in repr(models)


def test_names_that_python_keeps_are_told_from_json():
    wall = documents.ExplainWallsMemoryClass.from_dict({"class": "weights", "gib": 1.5})
    assert wall.class_ == "weights" and wall.to_dict() == {"class": "weights", "gib": 1.5}
    assert "class" in repr(wall) and "class_" not in repr(wall)


def test_fields_that_are_missing_stay_missing_and_unknown_ones_are_left_out():
    row = FOUND.plans[0].to_dict()
    assert "goodput" not in row
    assert moe_plan.SearchPlan.from_dict({**row, "made_up": 1}).to_dict() == row
