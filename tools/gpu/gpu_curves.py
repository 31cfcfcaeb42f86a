"""What tools/gpu-check holds of losses: a GPU's beside the CPU's, and low precisions beside BF16."""
import json
import pathlib
import shutil

import gpu_kernels

# A model that learns text in 300 steps. The CPU's ranks share the batch, on a machine of several cores.
LEARNER = {"vocab_size": 257, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
           "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 8,
           "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

# Precisions, and how far their loss may be from BF16's.
LOW_CURVES = [("fp8-blockwise", 0.01), ("mxfp8", 0.01), ("fp8-tensor", 0.015), ("nvfp4", 0.03)]
# BF16 alone is 0.4 % off itself where micro-batches are halved, which changes the order of sums: seeds are averaged.
SEEDS, LAST = (1, 2, 3, 4), 50


def texts(check, ranks=1):
    """Losses of 300 steps of text on both back ends. Rounding turns into other choices of experts after some dozens of
    steps: means over 50 steps are held. Those of two CPU plans differ by up to 0.4 % here."""
    losses = []
    shared = f"dp={ranks} ep={ranks} mbs={8 // ranks} cuda_graph=full"
    for hardware, gpus, backend, fields in (("cpu-local", 8, "cpu", "dp=8 mbs=1"), ("h200", ranks, "cuda", shared)):
        if check.trained(LEARNER, 128, 8, fields, hardware=hardware, gpus=gpus, backend=backend, steps=300, precision="fp32",
                         more=("--lr", "4e-4")) is None:
            return
        losses.append([step["loss"] for step in json.loads((check.folder / "run/run.json").read_text())["steps"]])
    means = [[sum(curve[at:at + 50]) / 50 for at in range(0, 300, 50)] for curve in losses]
    worst = max(abs(a / b - 1) for a, b in zip(*means))
    check.rows.below(f"300 steps of text, loss {losses[0][0]:.3f} to {losses[0][-1]:.3f}: farthest mean of 50 steps from the CPU's",
                     "relative", worst if len(losses[0]) == len(losses[1]) == 300 else -1.0, 0.01)


def last_loss(check, precision, fields):
    """Mean loss of the last steps of 1,000 over all seeds, and the first seed's first loss; None with a row where a run failed. The seeds
    train at once, since most of a run's time is the host's."""
    model = {**LEARNER, "head_dim": 64, "moe_intermediate_size": 128}
    if check.searched(model, 128, 8, fields + " cuda_graph=full", precision=precision) is None:
        return None

    def curve(seed):
        run = f"curve-{seed}"
        shutil.rmtree(check.folder / run, ignore_errors=True)
        if check.plan("execute", "plan.json", "--data", "sources", "--backend", "cuda", "--steps", "1000", "--run-dir", run,
                      "--lr", "4e-4", "--shuffle", "on", "--seed", str(seed)) is None:
            return None
        return [step["loss"] for step in json.loads((check.folder / run / "run.json").read_text())["steps"]]

    curves = [losses for _, losses in gpu_kernels.at_once(SEEDS, curve)]
    if None in curves:
        return None
    if short := [len(losses) for losses in curves if len(losses) != 1000]:
        return check.rows.failed(f"1,000 steps in {precision}", f"{short[0]} steps were run")
    return sum(sum(losses[-LAST:]) / LAST for losses in curves) / len(curves), curves[0][0]


def low_precisions(check):
    """Losses of 1,000 steps of this project's sources in low precisions beside BF16, and BF16 beside itself in other sums."""
    sources = [f for part in ("planner", "simulator", "engine", "kernels") for f in sorted(pathlib.Path(part).rglob("*.[ch]pp"))]
    (check.folder / "sources.txt").write_text("".join(f.read_text() for f in sources))
    if check.plan("tokenize", "sources.txt", "--out", "sources") is None:
        return
    wide = last_loss(check, "bf16", "mbs=8")
    for precision, fields, bar in (("bf16", "mbs=4", None), *((name, "mbs=8", bar) for name, bar in LOW_CURVES)):
        low = last_loss(check, precision, fields) if wide is not None else None
        if low is None:
            return
        name = (f"1,000 steps in {precision}, {fields}, {len(SEEDS)} seeds, loss {low[1]:.3f} to {low[0]:.4f}, "
                f"BF16's {wide[0]:.4f}: last mean of {LAST} steps")
        off = abs(low[0] / wide[0] - 1)
        if bar is None:
            check.rows.add(name, "relative", off, 0.0, None, True)
        else:
            check.rows.below(name, "relative", off, bar)
