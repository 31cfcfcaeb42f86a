#!/usr/bin/env python3
"""A distributed checkpoint of Megatron-Core itself, of a small model of samples.cpp, and the loss that it computes with it.

make.py FOLDER: on the CPU, by megatron-core, torch and psutil; made/ is of megatron-core 0.16.1 and torch 2.15. Beside the checkpoint lies
loss.json: the mean loss of 8 samples of 32 tokens, token t of sample s being (7 s t + 3 t + s) mod 61. Exits 77 (skipped)
without the packages."""
import contextlib
import json
import os
import shutil
import sys

SEQ, SAMPLES, VOCAB = 32, 8, 61
QWEN3 = dict(num_query_groups=4, kv_channels=8, qk_layernorm=True, moe_ffn_hidden_size=16)


def start():
    import torch
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641", RANK="0", WORLD_SIZE="1")
    torch.cuda.Stream = lambda *_, **__: None  # what asks for a GPU even where nothing runs on one
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.distributed.init_process_group("gloo")
    return torch


def build(torch):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # nothing is dropped
    from megatron.core.transformer.moe import moe_utils
    moe_utils.te_general_gemm = None  # the router's product is torch's
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.initialize_model_parallel()
    options = dict(num_layers=4, hidden_size=32, num_attention_heads=8, ffn_hidden_size=64, num_moe_experts=8,
                   moe_router_topk=2, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
                   add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-6, use_cpu_initialization=True,
                   params_dtype=torch.float32, pipeline_dtype=torch.float32, moe_router_load_balancing_type="none",
                   moe_token_dispatcher_type="allgather", gradient_accumulation_fusion=False, bias_dropout_fusion=False,
                   masked_softmax_fusion=False, apply_rope_fusion=False, hidden_dropout=0.0, attention_dropout=0.0) | QWEN3
    config = TransformerConfig(**options)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=SEQ, position_embedding_type="rope",
                    rotary_base=10000, share_embeddings_and_output_weights=False)


def make(folder):
    torch = start()
    model = build(torch)
    from megatron.core import dist_checkpointing
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in sorted(model.named_parameters()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in key else 0.0))
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    tokens = torch.tensor([[(7 * s * t + 3 * t + s) % VOCAB for t in range(SEQ + 1)] for s in range(SAMPLES)])
    model.eval()
    with torch.no_grad():
        mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
        logits = model(tokens[:, :SEQ], torch.arange(SEQ)[None].expand(SAMPLES, -1), mask)[..., :VOCAB]
        loss = torch.nn.functional.cross_entropy(logits.double().reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)).item()
    return loss


def main():
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    folder = sys.argv[1]
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    loss = make(folder)
    with open(os.path.join(folder, "loss.json"), "w", encoding="utf-8") as out:
        json.dump({"loss": loss}, out)
    print(loss, sorted(os.listdir(folder)))


if __name__ == "__main__":
    main()
