#!/usr/bin/env python3
"""Trains the small models of samples.cpp on this project's sources, 300 steps on each back end, and compares their losses.

    tests/engine/train/curves.py BUILD/tools/moe-plan [--backends cpu,cuda] [--precisions bf16,mxfp8] [--models granite,olmoe] [--jobs 8]

By hand: it takes seconds for each model. Prints a table of first and last loss, and how far the farthest mean of 50 steps is from the
first column's: rounding becomes other choices of experts after some dozens of steps, so that single steps differ.
"""
import argparse
import concurrent.futures
import json
import pathlib
import re
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
STEPS, MEAN = 300, 50


def configs():
    """Configurations by name, of byte tokens."""
    source = pathlib.Path(__file__).with_name("samples.cpp").read_text()
    common = re.search(r'const char\* common = R"\((.*?)\)";', source, re.S)[1]
    own = re.findall(r'\{"([\w.-]+)",\s*R"\((.*?)\)"\}', source, re.S)
    return {name: {**json.loads("{" + common + fields + "}"), "vocab_size": 257} for name, fields in own}


def train(command, folder, hardware, backend, precision, config):
    """The losses, or what went wrong."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    fixed = ["--fix", "mbs=8", "--fix", f"cuda_graph={'none' if backend == 'cpu' else 'full'}"]
    search = ["search", "--model", "config.json", "--hardware", hardware, "--gpus", "1", "--gbs", "8", "--seq", "128", "--stack", "moe-plan",
              "--precision", precision, "--out", "plan.json", *fixed]
    execute = ["execute", "plan.json", "--data", "../text", "--steps", str(STEPS), "--backend", backend, "--run-dir", "run", "--lr", "1e-3"]
    for words in (search, execute):
        done = subprocess.run([command, *words], cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1]
    return [step["loss"] for step in json.loads((folder / "run/run.json").read_text())["steps"]]


def means(losses):
    return [sum(losses[at:at + MEAN]) / MEAN for at in range(0, STEPS, MEAN)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", type=pathlib.Path)
    parser.add_argument("--backends", default="cpu,cuda")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--models")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--hardware", default="h200", help="profile of the GPU")
    options = parser.parse_args()
    known, command = configs(), options.command.resolve()
    columns = [(backend, precision) for backend in options.backends.split(",") for precision in options.precisions.split(",")]
    names = options.models.split(",") if options.models else list(known)
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text("".join(file.read_text() for file in sorted((ROOT / "planner").rglob("*.cpp"))))
        subprocess.run([command, "tokenize", "text.txt", "--out", "text"], cwd=folder, check=True, capture_output=True)
        runs = {(model, *column): pool.submit(train, command, folder / "-".join((model, *column)),
                                              "cpu-local" if column[0] == "cpu" else options.hardware, *column, known[model])
                for model in names for column in columns}
        heads = [" ".join(column) for column in columns]
        print(f"| model | {' | '.join(heads)} | farthest mean of {MEAN} steps |\n|---|{'---|' * len(heads)}---|")
        for model in names:
            losses = [runs[(model, *column)].result() for column in columns]
            cells = [curve if isinstance(curve, str) else f"{curve[0]:.3f} to {curve[-1]:.3f}" for curve in losses]
            far = ", ".join("-" if isinstance(curve, str) or isinstance(losses[0], str) else
                            f"{100 * max(abs(a / b - 1) for a, b in zip(means(curve), means(losses[0]))):.2f} %" for curve in losses[1:])
            print(f"| {model} | {' | '.join(cells)} | {far} |", flush=True)


if __name__ == "__main__":
    main()
