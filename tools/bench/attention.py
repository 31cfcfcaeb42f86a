#!/usr/bin/env python3
"""Times attention beside PyTorch's scaled_dot_product_attention (cuDNN back end), in turn, in TFLOPS.

    tools/bench/attention.py build/tools/bench/libbench-attention.so [REPEATS]

Needs PyTorch 2.9 or later on a Hopper GPU; both take the cuDNN that PyTorch brings. Before it is timed every result is
held to the plain FP32 kernels and the deterministic backward to its own bits in two further runs. Times are medians of
CUDA events, the two in turn; FLOPs count the visible pairs only. Everything is timed twice: with the backward that sums
in any order, as PyTorch's does, and with the deterministic one.
"""
import ctypes
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from timing import medians

# batch, sequence, heads, key heads, width of keys, of values, window (0: none), causal
SHAPES = (
    (4, 4096, 32, 4, 128, 128, 0, 1),
    (1, 4096, 128, 128, 192, 128, 0, 1),
    (1, 4096, 32, 8, 128, 128, 0, 1),
    (8, 1024, 16, 16, 64, 64, 0, 1),
    (1, 8192, 64, 8, 64, 64, 128, 1),
    (2, 4096, 16, 4, 128, 128, 0, 0),
    (1, 16384, 32, 8, 128, 128, 0, 1),
    (1, 32768, 16, 2, 128, 128, 0, 1),
)


class Ours:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        numbers = [ctypes.c_int, ctypes.c_void_p, ctypes.c_double]
        self.library.moe_attention.argtypes = numbers + [ctypes.c_void_p] * 7
        self.library.moe_attention_grad.argtypes = numbers + [ctypes.c_void_p] * 10
        self.library.moe_attention_scratch.restype = ctypes.c_int64

    def scratch(self):
        return self.library.moe_attention_scratch()

    def call(self, function, plain, shape, operands):
        sizes = (ctypes.c_int64 * 9)(*shape)
        pointers = [None if t is None else t.data_ptr() for t in operands]
        if function(plain, sizes, shape[4] ** -0.5, *pointers, torch.cuda.current_stream().cuda_stream):
            sys.exit(1)

    def forward(self, shape, q, k, v, o, lse, plain=0):
        self.call(self.library.moe_attention, plain, shape, (q, k, v, None, o, lse))

    def backward(self, shape, *operands, plain=0):
        self.call(self.library.moe_attention_grad, plain, shape, operands)


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def visible_pairs(shape):
    batch, seq, heads, _, _, _, window, causal, _ = shape
    if not causal:
        return batch * heads * seq * seq
    longest = window or seq
    return batch * heads * (longest * (longest + 1) // 2 + (seq - longest) * longest)


def poisoned(*sizes, dtype=torch.bfloat16):
    return torch.full(sizes, float("nan"), device="cuda", dtype=dtype)


def check(ours, shape, q, k, v, dout):
    """The largest error against the plain kernels, and whether three backwards gave the same bits."""
    batch, seq, heads = shape[:3]
    results = []
    for plain in (0, 1):
        o, lse = poisoned(*dout.shape), poisoned(heads, seq, batch, dtype=torch.float32)
        ours.forward(shape, q, k, v, o, lse, plain=plain)
        grads = [poisoned(*t.shape) for t in (q, k, v)]
        ours.backward(shape, dout, q, k, v, o, lse, *grads, plain=plain)
        results.append((o, lse, *grads))
    errors = [error(got, want) for got, want in zip(*results)]
    same = True
    for _ in range(2):
        again = [poisoned(*t.shape) for t in (q, k, v)]
        ours.backward(shape, dout, q, k, v, *results[0][:2], *again)
        same = same and all(torch.equal(a, b) for a, b in zip(again, results[0][2:]))
    return errors, same, results[0][:2]


def theirs(shape, q, k, v, dout):
    # Its own layout, [batch, heads, sequence, width].
    q, k, v, dout = (t.permute(1, 2, 0, 3).contiguous() for t in (q, k, v, dout))
    for t in (q, k, v):
        t.requires_grad_()

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(shape[7]), enable_gqa=shape[2] != shape[3])

    return forward, lambda o: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)


def compare(ours, shape, repeats):
    batch, seq, heads, kv_heads, d, dv, window, causal, deterministic = shape
    new = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
    q, dout = new(seq, batch, heads, d), new(seq, batch, heads, dv)
    k, v = new(seq, batch, kv_heads, d), new(seq, batch, kv_heads, dv)
    errors, same, (o, lse) = check(ours, shape, q, k, v, dout)
    grads = [poisoned(*t.shape) for t in (q, k, v)]
    forwards = [lambda: ours.forward(shape, q, k, v, o, lse)]
    backwards = [lambda: ours.backward(shape, dout, q, k, v, o, lse, *grads)]
    if window == 0: # PyTorch's has none
        forward, backward = theirs(shape, q, k, v, dout)
        out = forward()
        forwards.append(forward), backwards.append(lambda: backward(out))
    pairs = visible_pairs(shape)
    lines = []
    for calls, flops in ((forwards, 2.0 * pairs * (d + dv)), (backwards, 2.0 * pairs * (3 * d + 2 * dv))):
        rates = [flops / ms / 1e9 for ms in medians(calls, repeats)]
        beside = f" torch {rates[1]:4.0f} ratio {rates[0] / rates[1]:.2f}" if len(rates) > 1 else " " * 22
        lines.append(f"{rates[0]:4.0f}{beside}")
    print(f"{batch}x{seq:<5} heads {heads:3}/{kv_heads:<3} {d}/{dv} window {window:<4} {'causal' if causal else 'full  '} "
          f"forward {lines[0]}  backward {lines[1]}  scratch {ours.scratch() >> 20} MiB  "
          f"errors {' '.join(f'{e:.1e}' for e in errors)} {'same bits' if same else 'OTHER BITS'}", flush=True)
    if not max(errors) < 1.2e-2 or not (same or not deterministic):
        sys.exit("the results are off")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    torch.cuda.init()
    torch.manual_seed(1)
    ours = Ours(sys.argv[1])
    ours.library.moe_attention_library()
    for deterministic in (0, 1):
        print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
              f"backward: {'deterministic' if deterministic else 'in any order'}", flush=True)
        for shape in SHAPES:
            compare(ours, (*shape, deterministic), int(sys.argv[2]) if len(sys.argv) == 3 else 20)


if __name__ == "__main__":
    main()
