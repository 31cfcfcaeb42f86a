#!/usr/bin/env python3
"""Trains the small models of samples.cpp on this project's sources, 300 steps on each back end, and compares their losses.

    tests/engine/train/curves.py BUILD/tools/moe-plan [--backends cpu,cuda] [--models granite,olmoe] [--jobs 8] [--hardware h200]

By hand: it takes seconds for each model. Prints a table of first and last loss, and how far the farthest mean of 50 steps is from the
first back end's: rounding becomes other choices of experts after some dozens of steps, so that single steps differ.
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


def train(command, folder, hardware, backend, config):
    """The losses, or what went wrong."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    fixed = ["--fix", "mbs=8", "--fix", f"cuda_graph={'none' if backend == 'cpu' else 'full'}"]
    search = ["search", "--model", "config.json", "--hardware", hardware, "--gpus", "1", "--gbs", "8", "--seq", "128", "--precision", "fp32",
              "--stack", "moe-plan", "--out", "plan.json", *fixed]
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
    parser.add_argument("--models")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--hardware", default="h200", help="profile of the GPU")
    options = parser.parse_args()
    known, backends, command = configs(), options.backends.split(","), options.command.resolve()
    names = options.models.split(",") if options.models else list(known)
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text("".join(file.read_text() for file in sorted((ROOT / "planner").rglob("*.cpp"))))
        subprocess.run([command, "tokenize", "text.txt", "--out", "text"], cwd=folder, check=True, capture_output=True)
        runs = {(model, backend): pool.submit(train, command, folder / f"{model}-{backend}", "cpu-local" if backend == "cpu" else options.hardware,
                                              backend, known[model]) for model in names for backend in backends}
        print(f"| model | {' | '.join(backends)} | farthest mean of {MEAN} steps |\n|---|{'---|' * len(backends)}---|")
        for model in names:
            losses = [runs[model, backend].result() for backend in backends]
            cells = [curve if isinstance(curve, str) else f"{curve[0]:.3f} to {curve[-1]:.3f}" for curve in losses]
            far = "-" if any(isinstance(curve, str) for curve in losses) else max(
                abs(a / b - 1) for curve in losses for a, b in zip(means(curve), means(losses[0])))
            print(f"| {model} | {' | '.join(cells)} | {far if isinstance(far, str) else f'{100 * far:.2f} %'} |", flush=True)


if __name__ == "__main__":
    main()
