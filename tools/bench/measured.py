#!/usr/bin/env python3
"""The measurements of profiles/measured at a glance: its TABLE.md, or what one of its documents says.

    tools/bench/measured.py                       # prints a row per document; profiles/measured/TABLE.md holds this table
    tools/bench/measured.py --write               # writes TABLE.md anew
    tools/bench/measured.py --check               # exit status 1 and the lines that differ, where TABLE.md is another one
    tools/bench/measured.py NAME                  # its note, and every row that missed its bar
"""
import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "profiles/measured"
TABLE = FOLDER / "TABLE.md"
INTRODUCTION = ["# Own measurements, document by document", "",
                "`tools/bench/measured.py --write` writes this file; [README.md](README.md) says what the columns mean.", ""]
HEAD = ["document", "device", "of", "rows met", "plans", "steps off by, mean and worst", "memory, worst"]


def documents():
    """Names and contents, the latest first."""
    found = {file.stem: json.loads(file.read_text()) for file in FOLDER.glob("*.json")}
    runs = {name: run for name, run in found.items() if isinstance(run, dict)}
    return sorted(runs.items(), key=lambda item: (item[1]["date"], item[0]), reverse=True)


def errors(run, what):
    """Relative errors of predicted steps or memory."""
    rows = [row for row in run.get("rows", []) if row["name"].endswith((f": {what}", f": {what}, predicted beside measured"))]
    return [abs(row["ours"] / row["reference"] - 1) for row in rows if row["reference"]]


def held(run):
    return [row for row in run.get("rows", []) if row.get("bar") is not None]


def line(name, run):
    rows, steps, memory = held(run), errors(run, "step"), errors(run, "memory")
    met = f"{sum(row['ok'] for row in rows)} of {len(rows)}" if rows else "-"
    off = f"{100 * sum(steps) / len(steps):.1f} %, {100 * max(steps):.1f} %" if steps else "-"
    device = run["device"].replace("NVIDIA ", "").replace(" 80GB HBM3", "")
    return [f"[{name}]({name}.json)", device, run.get("what", "-"), met, str(len(steps) or "-"), off, f"{100 * max(memory):.1f} %" if memory else "-"]


def table():
    lines = [HEAD, ["---"] * len(HEAD)] + [line(*document) for document in documents()]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def text():
    """All of TABLE.md."""
    return "\n".join([*INTRODUCTION, *table()]) + "\n"


def missed(run):
    for row in run.get("rows", []):
        if not row["ok"]:
            figures = [f"{key} {row[key]:.4g}" for key in ("ours", "reference", "ratio", "bar") if row.get(key) is not None]
            yield f"  {row['name']}: {', '.join(figures)} {row['unit']}".rstrip()


def main(arguments):
    if arguments == ["--check"]:
        there = TABLE.read_text()
        if there == text():
            print("profiles/measured/TABLE.md holds this table")
            return 0
        wrong = sorted(set(there.splitlines()) ^ set(text().splitlines())) or ["the order of the lines"]
        print("\n".join(["what differs between profiles/measured/TABLE.md and its documents:", *wrong]))
        return 1
    if arguments == ["--write"]:
        TABLE.write_text(text())
        return 0
    if not arguments:
        print("\n".join(table()))
        return 0
    run = dict(documents()).get(arguments[0].removesuffix(".json"))
    if run is None or len(arguments) > 1:
        print(f"{' '.join(arguments)}: no document of {FOLDER}; without a name all are listed", file=sys.stderr)
        return 2
    for key in ("device", "date", "commit", "command", "note"):
        print(f"{key}: {run.get(key, '-')}")
    print("\n".join(["missed:", *missed(run)]) if any(missed(run)) else "every bar was met")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
