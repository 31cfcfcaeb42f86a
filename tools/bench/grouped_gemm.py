#!/usr/bin/env python3
"""Times the grouped products beside PyTorch's torch._grouped_mm, in turn, on the same data, in TFLOPS.

    tools/bench/grouped_gemm.py build/tools/libbench-grouped-gemm.so [REPEATS]

Needs PyTorch 2.9 or later on a Hopper GPU. Rows per expert are drawn from a Dirichlet distribution (alpha 8). Every
result is first held to FP32 products of PyTorch per expert. Times are medians of CUDA events, one call each, the
variants in turn. PyTorch's wgrad writes BF16; "torch +=" adds it to FP32 gradients, which is what ours does.
"dense" is one product of all rows with one weight by cuBLAS.
"""
import ctypes
import sys

import torch

from timing import medians

FORMS = ("forward", "dgrad", "wgrad")
# experts, rows, n, k: fine-grained experts, coarse ones, and a small model's
SHAPES = (
    (128, 65536, 1536, 2048),
    (128, 65536, 2048, 768),
    (16, 65536, 1536, 2048),
    (8, 16384, 28672, 4096),
    (32, 65536, 4096, 7168),
    (16, 8192, 1024, 1024),
    (16, 8192, 1024, 512),
)


def load(path):
    function = ctypes.CDLL(path).moe_grouped_gemm
    function.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5
    return function


def draw_counts(experts, rows):
    share = torch.distributions.Dirichlet(torch.full((experts,), 8.0)).sample()
    counts = (share * rows).long()
    counts[0] += rows - counts.sum()
    return counts


def operands(form, counts, rows, n, k):
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    a = torch.randn(rows, k if form == 0 else n, **bf16)
    if form == 2:
        return a, torch.randn(rows, k, **bf16), torch.zeros(len(counts), n, k, device="cuda")
    return a, torch.randn(len(counts), n, k, **bf16), torch.full((rows, n if form == 0 else k), float("nan"), **bf16)


def check(form, counts, a, b, c):
    """Relative error of c, as one call leaves it."""
    error = norm = 0.0
    first = 0
    for e, count in enumerate(counts.tolist()):
        x = a[first : first + count].float()
        if form == 2:
            want, got = x.T @ b[first : first + count].float(), c[e]
        else:
            want, got = x @ (b[e].float().T if form == 0 else b[e].float()), c[first : first + count]
        error += (got.float() - want).square().sum().item()
        norm += want.square().sum().item()
        first += count
    return (error / norm) ** 0.5


def compare(function, form, shape, repeats):
    experts, rows, n, k = shape
    counts = draw_counts(experts, rows)
    a, b, c = operands(form, counts, rows, n, k)
    on_device = counts.to("cuda", torch.int32)
    ends = on_device.cumsum(0).to(torch.int32)
    stream = torch.cuda.current_stream().cuda_stream

    def ours():
        if function(form, experts, n, k, rows, a.data_ptr(), b.data_ptr(), on_device.data_ptr(), c.data_ptr(), stream):
            sys.exit(1)

    ours()
    error = check(form, counts, a, b, c)
    theirs = (a.t() if form == 2 else a, b.transpose(1, 2) if form == 0 else b)
    calls = {"ours": ours, "torch": lambda: torch._grouped_mm(*theirs, offs=ends)}
    if form == 2:
        calls["torch +="] = lambda: c.add_(torch._grouped_mm(*theirs, offs=ends))
    weight = a if form == 2 else b[0].t() if form == 0 else b[0]
    calls["dense"] = lambda: a.t() @ b if form == 2 else a @ weight
    rates = [2.0 * rows * n * k / ms / 1e9 for ms in medians(list(calls.values()), repeats)]
    figures = "  ".join(f"{name} {rate:5.0f}" for name, rate in zip(calls, rates))
    print(f"{experts:4} experts {rows:6} rows {n:5}x{k:<5} {FORMS[form]:8} {figures}  ours/torch {rates[0] / rates[1]:.2f}"
          f"  error {error:.1e}", flush=True)
    if not error < (1e-5 if form == 2 else 4e-3):
        sys.exit(f"the error of {FORMS[form]} is {error}")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    function = load(sys.argv[1])
    for shape in SHAPES:
        for form in range(3):
            compare(function, form, shape, int(sys.argv[2]) if len(sys.argv) == 3 else 20)


main()
