"""What tools/gpu-check holds to PyTorch in the same run, in TFLOPS: grouped products and attention. Without PyTorch, or
without the libraries that tools/bench/ calls, it says so and holds nothing."""
import importlib.util
import pathlib
import re
import sys

LIBRARIES = ["tools/bench/libbench-grouped-gemm.so", "tools/bench/libbench-attention.so"]
ROUNDS = 5

# By experts, rows, n and k, what ours reach of PyTorch's: BF16 in its three forms, of gradients
# also as BF16 as theirs are, E4M3 forward. Other lines have no bar.
GROUPED = {
    (128, 65536, 1536, 2048): (1.10, 1.0),
    (128, 65536, 2048, 768): (1.10, 1.0),
    (16, 65536, 1536, 2048): (1.0, 1.0),
    (8, 16384, 28672, 4096): (1.0, 1.0),
    (32, 65536, 4096, 7168): (1.05, 1.0),
}
# By batch x sequence, heads, key heads, widths of keys and values.
ATTENTION = {("4x4096", 32, 4, 128, 128): 0.97, ("1x4096", 128, 128, 192, 128): 0.97}
DETERMINISTIC = 0.9  # of a backward in any order

GROUPED_LINE = re.compile(r"\s*(\d+) experts\s+(\d+) rows\s+(\d+)x(\d+)\s+(.+?)\s+ours\s+(\d+)\s+torch\s+(\d+)")
ATTENTION_LINE = re.compile(r"(\d+x\d+)\s+heads\s+(\d+)\s*/(\d+)\s+(\d+)/(\d+) window \d+\s+(causal|full)\s+"
                            r"forward\s+(\d+)(?: torch\s+(\d+) ratio \S+)?\s+backward\s+(\d+)(?: torch\s+(\d+) ratio \S+)?")


def grouped(said):
    """(name, ours, PyTorch's, bar or None) of every line of tools/bench/grouped_gemm.py."""
    for line in said.splitlines():
        if m := GROUPED_LINE.match(line):
            shape, what = tuple(map(int, m.groups()[:4])), m[5]
            bars = GROUPED.get(shape, (None, None))
            bar = {"forward": bars[0], "dgrad": bars[0], "wgrad": bars[0], "wgrad BF16": bars[0],
                   "forward E4M3": bars[1]}.get(what)
            yield f"{shape[0]} experts, {shape[1]:,} rows, {shape[2]}x{shape[3]}, {what}", float(m[6]), float(m[7]), bar


def attention(said):
    """The same of tools/bench/attention.py. The deterministic backward is beside one that is not."""
    order = ""
    for line in said.splitlines():
        if line.startswith("torch "):
            order = line.partition("backward: ")[2]
        elif m := ATTENTION_LINE.match(line):
            shape = (m[1], *map(int, m.groups()[1:5]))
            name = f"attention {m[1]}, heads {m[2]}/{m[3]}, {m[4]}/{m[5]}, {m[6]}"
            bar = ATTENTION.get(shape) if m[6] == "causal" else None
            if m[8] and order == "in any order":
                yield f"{name}, forward", float(m[7]), float(m[8]), bar
            if m[10]:
                yield f"{name}, backward {order}", float(m[9]), float(m[10]), bar if order == "in any order" else DETERMINISTIC


def beside(check, found):
    """check: of tools/gpu-check; found: the place of a program of its build."""
    if importlib.util.find_spec("torch") is None:
        return print("PyTorch is not here: nothing is held to it", flush=True)
    scripts = pathlib.Path(__file__).resolve().parents[1] / "bench"
    for library, script, lines in zip(LIBRARIES, ("grouped_gemm.py", "attention.py"), (grouped, attention)):
        path = found(check.build, library)
        if not path.is_file():
            print(f"{path.name} is not here: {script} was left out", flush=True)
            continue
        done = check.run(script, sys.executable, scripts / script, path, ROUNDS)
        if done is None:
            continue
        if done.returncode != 0:
            check.rows.failed(script, (done.stderr.strip().splitlines() or ["no message"])[-1][:200])
        for name, ours, theirs, bar in lines(done.stdout):
            check.rows.add(f"{name}: beside PyTorch", "TFLOPS", ours, theirs, bar, bar is None or ours >= bar * theirs)
