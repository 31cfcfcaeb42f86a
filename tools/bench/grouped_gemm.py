#!/usr/bin/env python3
"""Times the grouped products beside PyTorch's, in turn, on the same data, in TFLOPS: BF16, and E4M3 with scales.

    tools/bench/grouped_gemm.py build/tools/bench/libbench-grouped-gemm.so [REPEATS [PART]]

PART: only products whose name begins so, such as "wgrad E4M3".

Needs PyTorch 2.9 or later on a Hopper GPU. Rows per expert are drawn from a Dirichlet distribution (alpha 8). Every
result is first held to FP32 products of PyTorch per expert. Times are medians of CUDA events, one call each, the
variants in turn. "torch" is torch._grouped_mm. Its wgrad sets BF16, as ours does in "wgrad BF16"; in "wgrad" ours sets
FP32, and "wgrad +=" adds to FP32 gradients in both. E4M3 has FP32 scales of 1 x 128 and 128 x 128 elements in ours, of
whole rows in torch._scaled_grouped_mm. "dense" is one product of all rows by cuBLAS. "wgrad E4M3" has scales of 128 rows x 1 column on
both sides and FP32 gradients; "bf16" is our wgrad of BF16 rows, "quantize" the time of bringing both operands from BF16
rows to columns of E4M3, counted as if it were the product. The last lines are dense products in E4M3 with scales of
1 x 128 and 128 x 128 elements on both sides, cuBLASLt's by torch._scaled_mm, which wants the scales of a column of
blocks side by side.
"""
import ctypes
import sys

import torch

from timing import medians

FORMS = ("forward", "dgrad", "wgrad", "wgrad +=", "wgrad BF16")
FORWARD, DGRAD, WGRAD, WGRAD_ADDS, WGRAD_BF16 = range(5)
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
# The same of the gradients that DeepGEMM's issue 107 times on an H800 and an H200.
GRADIENTS = tuple((experts, experts * rows, n, k) for experts in (4, 8) for rows in (4096, 8192)
                  for n, k in ((7168, 4096), (2048, 7168)) if experts * rows <= 32768)
# rows, n, k: query, key and value and the output of Qwen3-30B-A3B's attention, forward and dgrad, and a large square
DENSE = ((8192, 5120, 2048), (8192, 2048, 4096), (8192, 2048, 5120), (8192, 4096, 2048), (8192, 8192, 8192))
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def load(path):
    library = ctypes.CDLL(path)
    library.moe_grouped_gemm.argtypes = [ctypes.c_int] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 5
    library.moe_scaled_gemm.argtypes = [ctypes.c_int] + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 7
    library.moe_quantize_columns.argtypes = [ctypes.c_int] + [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 7
    library.moe_scaled_wgrad.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 7
    return library


def draw_counts(experts, rows):
    share = torch.distributions.Dirichlet(torch.full((experts,), 8.0)).sample()
    counts = (share * rows).long()
    counts[0] += rows - counts.sum()
    return counts


def operands(form, counts, rows, n, k):
    a = torch.randn(rows, k if form == FORWARD else n, **BF16)
    if form >= WGRAD:
        start = torch.zeros if form == WGRAD_ADDS else torch.empty
        c = start(len(counts), n, k, device="cuda", dtype=torch.bfloat16 if form == WGRAD_BF16 else torch.float32)
        return a, torch.randn(rows, k, **BF16), c if form == WGRAD_ADDS else c.fill_(float("nan"))
    c = torch.full((rows, n if form == FORWARD else k), float("nan"), **BF16)
    return a, torch.randn(len(counts), n, k, **BF16), c


def quantize(x, rows):
    """E4M3 and the scales of blocks of rows x 128, the largest of each block becoming 448, and what they stand for."""
    blocks = x.unflatten(-1, (-1, 128)).unflatten(-3, (-1, rows))
    scale = blocks.float().abs().amax(dim=(-3, -1), keepdim=True) / 448.0
    bytes_ = (blocks / scale).to(torch.float8_e4m3fn)
    back = (bytes_.float() * scale).flatten(-2, -1).flatten(-3, -2)
    return bytes_.flatten(-2, -1).flatten(-3, -2).contiguous(), scale.squeeze(-1).squeeze(-2).contiguous(), back


def check(form, counts, a, b, c):
    """Relative error of c, as one call leaves it."""
    error = norm = 0.0
    first = 0
    for e, count in enumerate(counts.tolist()):
        x = a[first : first + count].float()
        if form >= WGRAD:
            want, got = x.T @ b[first : first + count].float(), c[e]
        else:
            want, got = x @ (b[e].float().T if form == FORWARD else b[e].float()), c[first : first + count]
        error += (got.float() - want).square().sum().item()
        norm += want.square().sum().item()
        first += count
    return (error / norm) ** 0.5


def report(shape, what, calls, error, tolerance, repeats):
    experts, rows, n, k = shape
    rates = [2.0 * rows * n * k / ms / 1e9 for ms in medians(list(calls.values()), repeats)]
    figures = "  ".join(f"{name} {rate:5.0f}" for name, rate in zip(calls, rates))
    print(f"{experts:4} experts {rows:6} rows {n:5}x{k:<5} {what:12} {figures}  ours/torch {rates[0] / rates[1]:.2f}"
          f"  error {error:.1e}", flush=True)
    if not error < tolerance:
        sys.exit(f"the error of {what} is {error}")


def compare(library, form, shape, repeats):
    experts, rows, n, k = shape
    counts = draw_counts(experts, rows)
    a, b, c = operands(form, counts, rows, n, k)
    on_device = counts.to("cuda", torch.int32)
    ends = on_device.cumsum(0).to(torch.int32)
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [t.data_ptr() for t in (a, b, on_device, c)]

    def ours():
        low = c.dtype == torch.bfloat16
        if library.moe_grouped_gemm(min(form, WGRAD), form == WGRAD_ADDS, low, experts, n, k, rows, *pointers, stream):
            sys.exit(1)

    ours()
    error = check(form, counts, a, b, c)
    theirs = (a.t() if form >= WGRAD else a, b.transpose(1, 2) if form == FORWARD else b)
    product = lambda: torch._grouped_mm(*theirs, offs=ends)
    weight = a if form >= WGRAD else b[0].t() if form == FORWARD else b[0]
    dense = lambda: a.t() @ b if form >= WGRAD else a @ weight
    calls = {"ours": ours, "torch": product if form != WGRAD_ADDS else lambda: c.add_(product()), "dense": dense}
    report(shape, FORMS[form], calls, error, 1e-5 if c.dtype == torch.float32 else 4e-3, repeats)


def compare_scaled(library, shape, repeats):
    experts, rows, n, k = shape
    counts = draw_counts(experts, rows)
    a, b, c = operands(FORWARD, counts, rows, n, k)
    on_device = counts.to("cuda", torch.int32)
    ends = on_device.cumsum(0).to(torch.int32)
    a8, a_scale, a_back = quantize(a, 1)
    b8, b_scale, b_back = (torch.stack(t) for t in zip(*(quantize(w, 128) for w in b)))
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [t.data_ptr() for t in (a8, a_scale, b8, b_scale, on_device, c)]
    row_scale, column_scale = torch.rand(rows, device="cuda"), torch.rand(experts, n, device="cuda")

    def ours():
        if library.moe_scaled_gemm(experts, n, k, rows, *pointers, stream):
            sys.exit(1)

    def theirs():
        return torch._scaled_grouped_mm(a8, b8.transpose(1, 2), row_scale, column_scale, offs=ends,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    ours()
    error = check(FORWARD, counts, a_back, b_back, c)
    report(shape, "forward E4M3", {"ours": ours, "torch": theirs}, error, 4e-3, repeats)


def columns_of(library, x, counts, on_device):
    """A call that quantizes the rows of x along each expert's rows, and where it puts bytes and scales."""
    rows, cols = x.shape
    blocks = (rows + 127 * min(rows, len(counts))) // 128
    data = torch.empty(blocks, cols, 128, device="cuda", dtype=torch.uint8)
    scale = torch.empty(blocks, cols, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [x.data_ptr(), on_device.data_ptr(), None, None, data.data_ptr(), scale.data_ptr()]

    def call():
        if library.moe_quantize_columns(len(counts), rows, cols, *pointers, stream):
            sys.exit(1)

    call()
    return call, data, scale


def check_columns(counts, a, b, before, c):
    """Relative error of what was added to the gradient, beside the FP32 product of what the columns stand for."""
    error = norm = 0.0
    first = 0
    for e, count in enumerate(counts.tolist()):
        end = first + (count + 127) // 128
        x, y = ((data[first:end].view(torch.float8_e4m3fn).float() * scale[first:end, :, None]).transpose(0, 1).flatten(1)
                for data, scale in (a, b))
        want = before[e] + x @ y.T
        error += (c[e] - want).square().sum().item()
        norm += want.square().sum().item()
        first = end
    return (error / norm) ** 0.5


def whole_row_gradient(counts, n, k):
    """torch._scaled_grouped_mm of as deep groups of random E4M3, or None where PyTorch does not take them."""
    ends = ((counts + 127) // 128 * 128).cumsum(0).to("cuda", torch.int32)
    depth, experts = int(ends[-1]), len(counts)
    a, b = (torch.randn(size, depth, **BF16).to(torch.float8_e4m3fn) for size in (n, k))
    a_scale, b_scale = torch.rand(n * experts, device="cuda"), torch.rand(k * experts, device="cuda")
    product = lambda: torch._scaled_grouped_mm(a, b.t(), a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16,
                                               use_fast_accum=True)
    try:
        product()
    except RuntimeError as refusal:
        print("PyTorch:", str(refusal).splitlines()[0], flush=True)
        return None
    return product


def compare_scaled_wgrad(library, form, shape, repeats):
    experts, rows, n, k = shape
    counts = draw_counts(experts, rows)
    a, b, c = operands(form, counts, rows, n, k)
    if form == WGRAD_ADDS:
        c.normal_()
    before = c.clone() if form == WGRAD_ADDS else torch.zeros_like(c)
    on_device = counts.to("cuda", torch.int32)
    (quantize_a, *a8), (quantize_b, *b8) = (columns_of(library, x, counts, on_device) for x in (a, b))
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [t.data_ptr() for t in (*a8, *b8, on_device, c)]
    wide = [t.data_ptr() for t in (a, b, on_device, c)]
    adds = form == WGRAD_ADDS

    def ours():
        if library.moe_scaled_wgrad(adds, experts, n, k, rows, *pointers, stream):
            sys.exit(1)

    def bf16():
        if library.moe_grouped_gemm(WGRAD, adds, False, experts, n, k, rows, *wide, stream):
            sys.exit(1)

    ours()
    error = check_columns(counts, a8, b8, before, c)
    del before
    theirs = whole_row_gradient(counts, n, k)
    if theirs is not None and adds:
        product = theirs
        theirs = lambda: c.add_(product())
    calls = {"ours": ours, "torch": theirs or bf16, "bf16": bf16, "quantize": lambda: (quantize_a(), quantize_b())}
    report(shape, "wgrad E4M3" + (" +=" if adds else ""), calls, error, 1e-3, repeats)


def compare_dense(library, shape, repeats):
    rows, n, k = shape
    counts = torch.tensor([rows])
    a, b, c = operands(FORWARD, counts, rows, n, k)
    a8, a_scale, a_back = quantize(a, 1)
    b8, b_scale, b_back = quantize(b[0], 128)
    stream = torch.cuda.current_stream().cuda_stream
    pointers = [t.data_ptr() for t in (a8, a_scale, b8, b_scale)] + [None, c.data_ptr()]
    columns = a_scale.t().contiguous().t()

    def ours():
        if library.moe_scaled_gemm(1, n, k, rows, *pointers, stream):
            sys.exit(1)

    def theirs():
        return torch._scaled_mm(a8, b8.t(), columns, b_scale.t(), out_dtype=torch.bfloat16)

    ours()
    error = max(check(FORWARD, counts, a_back, b_back[None], c), check(FORWARD, counts, a_back, b_back[None], theirs()))
    calls = {"ours": ours, "torch": theirs, "bf16": lambda: a @ b[0].t()}
    report((1, *shape), "dense E4M3", calls, error, 4e-3, repeats)


def main():
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    library = load(sys.argv[1])
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    part = sys.argv[3] if len(sys.argv) > 3 else ""
    wanted = lambda what: what.startswith(part)
    gradients = [form for form in (WGRAD, WGRAD_ADDS) if wanted("wgrad E4M3" + (" +=" if form == WGRAD_ADDS else ""))]
    for shape in SHAPES:
        for form in range(len(FORMS)):
            if wanted(FORMS[form]):
                compare(library, form, shape, repeats)
        if wanted("forward E4M3"):
            compare_scaled(library, shape, repeats)
        for form in gradients:
            compare_scaled_wgrad(library, form, shape, repeats)
    for shape in GRADIENTS:
        for form in gradients:
            compare_scaled_wgrad(library, form, shape, repeats)
    for shape in DENSE:
        if wanted("dense E4M3"):
            compare_dense(library, shape, repeats)


main()
