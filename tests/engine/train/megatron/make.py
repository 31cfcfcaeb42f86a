#!/usr/bin/env python3
"""Distributed checkpoints that Megatron-Core itself writes, of small models of samples.cpp, by one rank and by several.

make.py FOLDER [CASE...] [--test engine_test]: FOLDER/CASE for each that the release writes, on the CPU, by megatron-core, torch, numpy
and psutil; the test then reads them. made/ is of megatron-core 0.16.1 and torch 2.15. Weights are given by their names
in transformers and their places there (weights.py). One rank computes the losses; where others write the checkpoint, Megatron-Core's
own reader gives them what the first one wrote. Beside a checkpoint lies case.json: the model's fields, the mean loss of 8 samples of
32 tokens, token t of sample s being (7 s t + 3 t + s) mod 61, and with one layer of MTP its mean. Exits 77 (skipped) without the packages."""
import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

for package in ("torch", "numpy", "psutil", "megatron"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: no package {package}")
        sys.exit(77)

import cases  # noqa: E402
import stand_in  # noqa: E402
import weights  # noqa: E402

SEQ, SAMPLES = 32, 8


def start(case, rank, ranks, port):
    import torch
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.cuda.Stream = lambda *_, **__: None  # what asks for a GPU even where nothing runs on one
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.distributed.init_process_group("gloo")
    if case.transformer_engine:
        stand_in.install("1.12.0")
    return torch


def build(torch, case, split):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # nothing is dropped
    from megatron.core.transformer.moe import moe_utils
    moe_utils.te_general_gemm = None  # the router's product is torch's
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.models import backends
    backends.DotProductAttention = stand_in.CoreAttention  # Megatron-Core's own has one width for keys and values
    if case.legacy_groups:
        from megatron.core.transformer.moe import grouped_gemm_util
        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    parallel_state.initialize_model_parallel(split.tp, split.pp, expert_model_parallel_size=split.ep,
                                             expert_tensor_parallel_size=split.etp)
    options = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
                   normalization="RMSNorm", layernorm_epsilon=1e-6, use_cpu_initialization=True, perform_initialization=False,
                   params_dtype=torch.float32, pipeline_dtype=torch.float32, moe_router_load_balancing_type="none",
                   moe_token_dispatcher_type="alltoall" if split.ep > 1 else "allgather", gradient_accumulation_fusion=False,
                   bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, hidden_dropout=0.0,
                   attention_dropout=0.0, attention_softmax_in_fp32=True, tensor_model_parallel_size=split.tp,
                   pipeline_model_parallel_size=split.pp, expert_model_parallel_size=split.ep,
                   expert_tensor_parallel_size=split.etp, sequence_parallel=split.tp > 1 and case.transformer_engine,
                   moe_grouped_gemm=case.groups or case.legacy_groups)
    if case.legacy_groups:
        options["moe_use_legacy_grouped_gemm"] = True
    kind = MLATransformerConfig if case.mla else TransformerConfig
    config = kind(**options | case.options())
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=case.transformer_engine)
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=case.transformer_engine)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=SEQ, position_embedding_type="rope",
                    rotary_base=10000, share_embeddings_and_output_weights=False, pre_process=first, post_process=last,
                    mtp_block_spec=mtp if last else None)


def losses(torch, model, case):
    tokens = torch.tensor([[(7 * s * t + 3 * t + s) % weights.VOCAB for t in range(SEQ + 1)] for s in range(SAMPLES)])
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    model.eval()
    heads = []  # hidden states of the decoder and behind them those of each MTP layer
    (model.mtp if case.mtp else model.decoder).register_forward_hook(lambda module, given, out: heads.append(out))
    with torch.no_grad():
        model(tokens[:, :SEQ], torch.arange(SEQ)[None].expand(SAMPLES, -1), mask, labels=tokens[:, 1:])
        means = []
        for depth, hidden in enumerate(torch.chunk(heads[0], 1 + case.mtp)):
            logits = model.output_layer(hidden)[0].transpose(0, 1)[:, :SEQ - depth, :weights.VOCAB]
            labels = tokens[:, 1 + depth:].reshape(-1)
            means.append(torch.nn.functional.cross_entropy(logits.double().reshape(-1, weights.VOCAB), labels).item())
    found = {"loss": means[0]}
    if case.mtp == 1:  # a second layer takes what the first one's norm has made, ours what is before that norm
        found["mtp_loss"] = means[1]
    return found


def of_a_run(torch, model_state):
    """What a run keeps beside its model: first moments of some weights, and what is no tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    moments = {key: make_sharded_optimizer_tensor(kept, kept.data * 0.5, "optimizer.state.exp_avg")
               for key, kept in model_state.items() if isinstance(kept, ShardedTensor) and "linear_proj" in key}
    return {"model": model_state, "optimizer": moments, "iteration": 7,
            "rng_state": ShardedObject("rng_state", [3], (1,), (0,), torch.distributed.get_rank())}


def save(torch, model, case, split, folder):
    from megatron.core import dist_checkpointing
    state = of_a_run(torch, model.sharded_state_dict(metadata=case.metadata()))
    strategy = None
    if split.spread:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"),
                                                    parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist_checkpointing.save(state, folder, strategy)


def load(model, case, folder):
    from megatron.core import dist_checkpointing
    state = model.sharded_state_dict(metadata=case.metadata())
    state = dist_checkpointing.load({"model": state}, folder)["model"]
    lacking = model.load_state_dict(state, strict=False)
    assert all("_extra_state" in key for key in lacking.missing_keys + lacking.unexpected_keys), lacking


def rank(name, folder, source, number, ranks, port):
    """One rank: the first writer fills the model, others load what it wrote and write it by their own split."""
    case = cases.CASES[name]
    torch = start(case, number, ranks, port)
    split = case.split if source else cases.Split()
    model = build(torch, case, split)
    if source:
        load(model, case, source)
    else:
        weights.fill(torch, model, case)
        if not case.legacy_groups:
            with open(os.path.join(os.path.dirname(folder), "losses.json"), "w", encoding="utf-8") as out:
                json.dump(losses(torch, model, case), out)
    if case.bf16:
        model.bfloat16()
        for module in model.modules():
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias = module.expert_bias.float()  # as Megatron-Core keeps it
    save(torch, model, case, split, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def launch(name, folder, source, ranks, port):
    os.makedirs(folder)
    above, last = os.path.split(os.path.abspath(folder))  # the metadata keeps the folder's name as it is given
    command = [sys.executable, os.path.abspath(__file__), last, name, "--source", source, "--ranks", str(ranks), "--port", str(port)]
    running = [subprocess.Popen(command + ["--rank", str(number)], cwd=above) for number in range(ranks)]
    if any([process.wait() for process in running]):
        sys.exit(f"{name}: a rank failed")


def make(name, folder):
    case = cases.CASES[name]
    port = 29600 + os.getpid() % 300
    with tempfile.TemporaryDirectory() as scratch:
        whole = os.path.join(scratch, "whole")
        launch(name, whole, "", 1, port)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
        if case.split.ranks == 1:
            shutil.move(whole, folder)
        else:
            launch(name, folder, whole, case.split.ranks, port + 1)
        described = {"model": case.model, "changed": case.changed()}
        if os.path.exists(os.path.join(scratch, "losses.json")):
            with open(os.path.join(scratch, "losses.json"), encoding="utf-8") as losses_file:
                described |= json.load(losses_file)
    with open(os.path.join(folder, "case.json"), "w", encoding="utf-8") as out:
        json.dump(described, out, indent=1)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, "common.pt"))  # objects of a run
    print(name, sorted(os.listdir(folder)), flush=True)


def written_here():
    """Cases that the installed release writes."""
    release = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
    return [name for name, case in cases.CASES.items() if case.releases[0] <= release <= case.releases[1]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--test", help="engine_test, which then reads them")
    parser.add_argument("--source", default="")
    for name, default in (("--rank", -1), ("--ranks", 1), ("--port", 29600)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    if given.rank >= 0:
        rank(given.names[0], given.folder, given.source, given.rank, given.ranks, given.port)
        return
    for name in given.names or written_here():
        make(name, os.path.join(given.folder, name))
    if given.test:
        environment = os.environ | {"MOE_PLAN_MEGATRON_MADE": given.folder}
        sys.exit(subprocess.run([given.test, "-tc=megatron checkpoints: every weight*"], env=environment).returncode)


if __name__ == "__main__":
    main()
