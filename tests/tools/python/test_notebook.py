"""The notebook of the guide: its cells run in order, and what each shows can be shown."""
import ast
import json
import os
import pathlib

NOTEBOOK = pathlib.Path(os.environ["SOURCE"]) / "docs/guide/python.ipynb"


def run_cell(source, names):
    """Runs a cell; returns the value of its last line where that is an expression, as a notebook shows it."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names, shown = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None  # it is committed as it is before a run
        value = run_cell("".join(cell["source"]), names)
        shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert sum("<table>" in text for text in shown) >= 3
    printed = capsys.readouterr().out
    assert "3 no plan for 1 GPU fits" in printed and "pretrain_gpt.py" in printed
