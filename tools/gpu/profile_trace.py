#!/usr/bin/env python3
"""Trains a small MoE of Hugging Face transformers under PyTorch's profiler, and keeps trace, model and timings.

    tools/gpu/profile_trace.py --out DIR                                              # one GPU
    torchrun --nproc-per-node 2 tools/gpu/profile_trace.py --out DIR                  # two GPUs, FSDP2

Needs PyTorch 2.11 and transformers 5.17 or later on a GPU. DIR gets

    config.json        the model, as `moe-plan search --model` reads it
    trace.json.gz      rank 0: the active steps of torch.profiler, with neither shapes nor stacks
    run.json           versions, device, command, seconds of every step without the profiler, memory, and the request of
                       moe-plan that stands for this training

`moe-plan compare PLAN --profile DIR/trace.json.gz` reads the trace. The model has the shape of Qwen3-30B-A3B made small:
few layers and 16 experts. It is held in BF16 on one GPU; with several, FSDP2 shards FP32 weights and gathers them in BF16.
"""
import argparse
import json
import os
import pathlib
import shlex
import statistics
import sys
import time

import torch
import torch.distributed as dist
import transformers

WAIT, WARMUP = 2, 2


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the three files")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a GPU in one step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps before the profiler starts")
    parser.add_argument("--active", type=int, default=2, help="steps that the trace holds")
    return parser.parse_args()


def configuration(layers, sequence):
    return transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=3072,
        moe_intermediate_size=768,
        num_experts=16,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        vocab_size=32768,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )


def sharded(model):
    """Layers and the rest as units of FSDP2: FP32 shards, BF16 weights while they are used, FP32 sums of gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def training(config, device, sequence, batch, world):
    """A function that trains for one step, on the same tokens each time, and returns the loss."""
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if world > 1 else torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if world > 1:
        model = sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (batch, sequence), device=device)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def timed(step, steps, synchronize):
    """Seconds and losses of steps, each from one synchronization of the device to the next."""
    seconds, losses = [], []
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        loss = step()
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return seconds, losses


def profiled(step, active, path):
    """The trace of the active steps. Every rank runs the steps; only a rank with a path records them."""
    if path is None:
        for _ in range(WAIT + WARMUP + active):
            step()
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=active, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule,
                                on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as profiler:
        for _ in range(WAIT + WARMUP + active):
            step()
            profiler.step()


def request(options, world):
    return (f"moe-plan search --model config.json --hardware MACHINE --gpus {world} --gbs {options.batch * world} "
            f"--seq {options.sequence} --precision bf16 --fix mbs={options.batch} --fix pp=1 --fix tp=1 --fix cp=1 --fix ep=1 "
            f"--fix recompute=none --fix offload=none --out plan.json")


def main():
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl")
    options.out.mkdir(parents=True, exist_ok=True)
    config = configuration(options.layers, options.sequence)
    step = training(config, device, options.sequence, options.batch, world)
    seconds, losses = timed(step, options.steps, torch.cuda.synchronize)
    memory = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    trace = options.out / "trace.json.gz"
    profiled(step, options.active, trace if rank == 0 else None)
    if rank == 0:
        config.save_pretrained(options.out)
        settled = seconds[len(seconds) // 2:]
        run = {
            "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
            "device": torch.cuda.get_device_name(),
            "gpus": world,
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__,
                         "transformers": transformers.__version__, "cuda": torch.version.cuda},
            "step_seconds": statistics.median(settled),
            "seconds": seconds,
            "losses": losses,
            "allocated_gib": memory[0],
            "reserved_gib": memory[1],
            "request": request(options, world),
        }
        (options.out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
        print(f"{trace}: {trace.stat().st_size:,} bytes; a step takes {run['step_seconds'] * 1e3:.2f} ms on "
              f"{run['device']}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
