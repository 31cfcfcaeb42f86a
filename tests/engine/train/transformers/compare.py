#!/usr/bin/env python3
"""Compares loss and gradients of tiny random checkpoints with those of transformers, for every architecture we train.

Usage: compare.py HF_STEP [CASE ...]     (HF_STEP: the hf_step executable of the build; CASE: names printed below)

Each case makes a model of the transformers class with random weights (norms and biases included), saves it, runs a
forward and backward pass on fixed tokens in FP32, and lets hf_step run the same step under one rank and under a plan
that splits it. Tolerances: 1e-5 relative for the loss, 1e-4 for |difference| / |gradient| of every parameter. The same
holds for the loss that an evaluation finds, and the tokens that cached decoding goes on with are the likeliest ones of
transformers' whole forwards.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}; pip install torch transformers to run this test")
    sys.exit(77)  # Meson's exit status for a skipped test

from cases import CASES, VOCAB
from indexers import IndexerLosses
from names import NAMES

transformers.utils.logging.disable_progress_bar()
# hf_step lies deeper in the build folder than the search for profiles goes.
os.environ.setdefault("MOE_PLAN_PROFILES", os.path.abspath(os.path.join(os.path.dirname(__file__), "../../../../profiles")))

SEQ, BATCH = 48, 8
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
PROMPT, NEAR_TIE = 16, 1e-4  # tokens of the prompt; logits nearer than this may be chosen either way


def tokens():
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCAB, (BATCH * SEQ + 1,), generator=generator)


def write_dataset(prefix, ids):
    """A Megatron indexed dataset of one document in 16-bit elements."""
    with open(prefix + ".bin", "wb") as file:
        file.write(ids.to(torch.int16).numpy().tobytes())
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2))
        file.write(struct.pack("<i", len(ids)) + struct.pack("<q", 0) + struct.pack("<qq", 0, 1))


class MtpLayer(torch.nn.Module):
    """Multi-token prediction, which transformers leaves out: the projection of (next token, hidden state), a decoder
    layer of the model and a norm before the shared head (arXiv 2412.19437 section 2.2; names of its checkpoint)."""

    def __init__(self, config):
        super().__init__()
        family = transformers.models.deepseek_v3.modeling_deepseek_v3
        layer = family.DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1)
        for name, child in layer.named_children():
            setattr(self, name, child)
        self.enorm = family.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = family.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = torch.nn.ModuleDict(
            {"norm": family.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def forward(self, hidden, embedded, rotary):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)[None, None]
        attended = self.self_attn(hidden_states=self.input_layernorm(x), attention_mask=mask,
                                  position_ids=positions, position_embeddings=rotary(x, positions))[0]
        x = x + attended
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


def mtp_loss(model, rows):
    """Cross-entropy of the token after the next one; the last position of a sample has none."""
    layers = model.model.layers
    mtp, layers_without = layers[-1], layers[:-1]
    model.model.layers = layers_without
    hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    model.model.layers = layers
    logits = model.lm_head(hidden)
    ahead = model.lm_head(mtp(hidden, model.model.embed_tokens(rows[:, 1:]), model.model.rotary_emb))
    return logits, torch.nn.functional.cross_entropy(ahead[:, :-1].flatten(0, 1).float(), rows[:, 2:].flatten())


# Classes that sample as they train, as we do not.
INFERENCE = ["PhimoeForCausalLM"]


def make_model(class_name, fields):
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**fields)
    torch.manual_seed(5)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    if getattr(config, "num_nextn_predict_layers", 0) > 0:
        model.model.layers.append(MtpLayer(config))
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # whose row would get no gradient
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if "norm" in name.split(".")[-2]:
                from_one = (hasattr(config, "linear_num_key_heads") and not name.endswith("linear_attn.norm.weight")
                            or class_name.startswith("Step3p7"))
                tensor.copy_((0.0 if from_one else 1.0) + 0.2 * torch.randn_like(tensor))
            elif name.endswith("bias"):  # e_score_correction_bias is a buffer
                tensor.copy_(0.1 * torch.randn_like(tensor))
            elif name.endswith(("layer_scalar", ".scale", "per_expert_scale")):
                tensor.copy_(1.0 + 0.2 * torch.randn_like(tensor))
            elif "inv_freq" not in name and not name.endswith("embed_scale") and tensor.is_floating_point():
                tensor.copy_(0.08 * torch.randn_like(tensor))
    return model.train() if class_name not in INFERENCE else model.eval()


def delta_parts(config, name, grad):
    """The parts of a gated delta net's matrices, and queries beside their gates; None: the matrix is one of ours."""
    at, leaf = name[:-len(".weight")].rpartition(".")[::2]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    k, v, share = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    if leaf == "q_proj":
        q, g = grad.reshape(config.num_attention_heads, 2, config.head_dim, -1).transpose(0, 1).flatten(1, 2)
        return [(f"{at}.q_proj.weight", q), (f"{at}.g_proj.weight", g)]
    if leaf in ("in_proj_qkv", "conv1d"):
        parts = grad.reshape(grad.shape[0], -1).split([keys * k, keys * k, values * v])
        stem = "conv1d_" if leaf == "conv1d" else "in_proj_"
        return [(f"{at}.{stem}{p}.weight", g) for p, g in zip("qkv", parts)]
    if leaf in ("in_proj_qkvz", "in_proj_ba"):
        rows = [k, k, share * v, share * v] if leaf == "in_proj_qkvz" else [share, share]
        parts = grad.reshape(keys, -1, grad.shape[-1]).split(rows, dim=1)
        return [(f"{at}.in_proj_{p}.weight", g.flatten(0, 1)) for p, g in zip(leaf[len("in_proj_"):], parts)]
    return None


def mixer_parts(config, name, grad):
    """The parts of a layer of Nemotron-H under the names of a Program."""
    at = re.fullmatch(r"(model\.layers\.(\d+)\.)(norm|mixer)\.(.*)", name)
    if not at:
        return [(name, grad)]
    kind = config.layers_block_type[int(at[2])]
    if at[3] == "norm":
        attends = kind in ("linear_attention", "full_attention", "mamba", "attention")
        return [(f"{at[1]}{'input' if attends else 'post_attention'}_layernorm.{at[4]}", grad)]
    if kind not in ("linear_attention", "mamba"):
        stem, leaf = ("self_attn" if "attention" in kind else "mlp"), at[4]
        if experts := re.fullmatch(r"experts\.(\w+)", leaf):
            return [(f"{at[1]}mlp.experts.{e}.{experts[1]}.weight", g) for e, g in enumerate(grad)]
        return [(f"{at[1]}{stem}.{leaf}", grad)]
    inner, groups = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
    return mamba_parts(f"{at[1]}mamba.", at[4], grad, inner, groups, config.mamba_num_heads)


def mamba_parts(at, name, grad, inner, groups, heads):
    """The parts of Mamba-2's projection and of its convolution."""
    rows = {"in_proj": dict(z=inner, x=inner, b=groups, c=groups, dt=heads), "conv1d": dict(x=inner, b=groups, c=groups)}
    module, _, leaf = name.rpartition(".")
    if module not in rows:
        return [(at + name, grad)]
    parts = grad.reshape(grad.shape[0], -1).split(list(rows[module].values()))
    return [(f"{at}{module}_{part}.{leaf}", g) for part, g in zip(rows[module], parts)]


def parts_of(model, name, grad):
    """The matrices of a Program that lie in a parameter of a class, under the Program's names."""
    kind = type(model).__name__
    for theirs, ours in NAMES.get(kind, []):
        name = name.replace(theirs, ours)
    layer = name.rsplit(".self_attn", 1)[0]
    if kind == "NemotronHForCausalLM":
        return mixer_parts(model.config, name, grad)
    if kind in ("GraniteMoeHybridForCausalLM", "BambaForCausalLM") and ".mamba." in name:
        at, _, rest = name.partition(".mamba.")
        config = model.config
        return mamba_parts(at + ".mamba.", rest, grad, config.mamba_expand * config.hidden_size,
                           config.mamba_n_groups * config.mamba_d_state, config.mamba_n_heads)
    if kind == "GraniteMoeHybridForCausalLM" and model.config.num_local_experts == 0:
        name = name.replace("mlp.shared_experts.", "mlp.")
    if kind == "Gemma4ForCausalLM" and model.config.enable_moe_block:
        name = re.sub(r"\.mlp\.(gate|up|down)_proj\.", r".mlp.shared_experts.\1_proj.", name)
    if hasattr(model.config, "linear_num_key_heads") and name.endswith(".weight"):
        if parts := delta_parts(model.config, name, grad):
            return parts
    if name.endswith("eh_proj.weight"):
        return zip((name + ".embedding", name + ".hidden"), grad.chunk(2, dim=1))
    if name.endswith("Wqkv.weight"):
        config = model.config
        width = config.d_model // config.n_heads
        rows = [config.n_heads * width] + 2 * [config.attn_config.kv_n_heads * width]
        return zip((f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"), grad.split(rows))
    if name.endswith(".input_linear.weight"):
        at = name[:-len("input_linear.weight")]
        return zip((at + "gate_proj.weight", at + "up_proj.weight"), grad.chunk(2))
    if name.endswith(".output_linear.weight"):
        return [(name.replace("output_linear", "down_proj"), grad)]
    rows = re.fullmatch(r"(.*\.experts)\.mlp\.(w1|v1|w2)", name)  # DBRX
    if rows:
        experts = grad.chunk(model.config.ffn_config.moe_num_experts)
        part = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}[rows[2]]
        return [(f"{rows[1]}.{e}.{part}.weight", g.T if part == "down_proj" else g) for e, g in enumerate(experts)]
    fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
    if not fused:
        return [(name, grad)]
    leaf = "bias" if fused[3] else "weight"
    transposed, in_turns = kind in ("GptOssForCausalLM", "Llama4ForCausalLM"), kind == "GptOssForCausalLM"
    parts = []
    for expert in range(grad.shape[0]):
        part = grad[expert].T if transposed and not fused[3] else grad[expert]
        at = f"{fused[1]}.{expert}."
        if fused[2] == "down_proj":
            parts.append((f"{at}down_proj.{leaf}", part))
        else:
            gate, up = (part[::2], part[1::2]) if in_turns else part.chunk(2, dim=0)
            parts += [(f"{at}gate_proj.{leaf}", gate), (f"{at}up_proj.{leaf}", up)]
    return parts


def reference(model, ids):
    """Mean cross-entropy over all positions and the gradients under the names of an unfused checkpoint."""
    rows = torch.stack([ids[k * SEQ:k * SEQ + SEQ + 1] for k in range(BATCH)])
    ahead = 0.0
    indexers = IndexerLosses(model)
    if getattr(model.config, "num_nextn_predict_layers", 0) > 0:
        logits, ahead = mtp_loss(model, rows)
    else:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    (loss + 0.1 * ahead + indexers.sum()).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if "vision" in name or "visual" in name or "projector" in name:
            continue
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for ours, part in parts_of(model, name, grad):
            gradients[ours] = part
    return loss.item(), gradients, ids[:PROMPT]


def goes_on_with(model, prompt, tokens):
    """What is wrong with the tokens, or "": each shall be the likeliest behind those before it."""
    ahead = getattr(model.config, "num_nextn_predict_layers", 0) > 0
    if ahead:
        layers = model.model.layers
        model.model.layers = layers[:-1]  # Multi-token prediction takes no part.
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, tokens])[None], use_cache=False).logits[0, len(prompt) - 1:-1]
    if ahead:
        model.model.layers = layers
    behind = logits.max(dim=-1).values - logits.gather(1, tokens[:, None])[:, 0]
    wrong = (behind > NEAR_TIE * logits.abs().max()).nonzero()
    return f"token {wrong[0].item()} of the text is {behind[wrong[0]].item():.1e} below the likeliest" if len(wrong) else ""


def plain_name(name):
    """Our gradient names are those of checkpoints; Mixtral's differ from its class's."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"(\.experts\.\d+)\.{old}\.weight$", rf"\1.{new}.weight", name)
    return name


def run_step(hf_step, folder, prefix, out, fields):
    command = [hf_step, folder, prefix, out, f"seq={SEQ}", f"gbs={BATCH}", *fields]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(fields) or 'one rank'}: {done.stderr.strip()}")
    message = done.stderr.strip()
    if message and not re.search("are not used: (vision_model|model.visual)[.]", message):  # beside the language model
        raise RuntimeError(f"unexpected message: {message}")
    result = {plain_name(name): tensor for name, tensor in load_file(out).items()}
    return result.pop("loss").item(), result.pop("evaluated").item(), result.pop("greedy").long(), result


def compare(label, ours, theirs, model):
    """Names what disagrees; returns whether all is well."""
    loss, evaluated, greedy, gradients = ours
    expected_loss, expected, prompt = theirs
    loss_error = abs(loss - expected_loss) / abs(expected_loss)
    worst, worst_name = 0.0, ""
    problems = []
    for name, grad in expected.items():
        if name not in gradients:
            problems.append(f"{name} has no gradient here")
            continue
        mine = gradients[name].reshape(grad.shape)
        scale = grad.norm().item()
        error = (mine - grad).norm().item() / scale if scale > 0 else mine.norm().item()
        if error > worst:
            worst, worst_name = error, name
        if not error <= GRADIENT_TOLERANCE:
            problems.append(f"{name}: {error:.2e}")
    # Buffers that transformers does not train (e_score_correction_bias) have a gradient of zero here.
    for name in set(gradients) - set(expected):
        if gradients[name].abs().max().item() != 0.0:
            problems.append(f"{name} is not a parameter of transformers")
    if not loss_error <= LOSS_TOLERANCE:
        problems.append(f"loss {loss} against {expected_loss}")
    if not abs(evaluated - expected_loss) / abs(expected_loss) <= LOSS_TOLERANCE:
        problems.append(f"evaluated loss {evaluated} against {expected_loss}")
    if text := goes_on_with(model, prompt, greedy):
        problems.append(text)
    print(f"  {label:28} loss {loss:.6f} ({loss_error:.1e}), worst gradient {worst:.1e} {worst_name}")
    for problem in problems[:12]:
        print(f"    WRONG {problem}")
    return not problems


def save_fused(model, folder):
    """The layout of transformers 5 in memory: experts of a layer in one tensor, Mixtral's block called mlp."""
    os.makedirs(folder)
    model.config.save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    config["architectures"] = [type(model).__name__]
    with open(path, "w") as file:
        json.dump(config, file)


def run_case(hf_step, name, work):
    class_name, fields, split = CASES[name]
    print(f"{name} ({class_name})")
    ids = tokens()
    prefix = os.path.join(work, "data")
    write_dataset(prefix, ids)
    model = make_model(class_name, fields)
    whole, sharded, fused = (os.path.join(work, kind) for kind in ("whole", "sharded", "fused"))
    model.save_pretrained(whole)
    model.save_pretrained(sharded, max_shard_size="100KB")
    save_fused(model, fused)
    theirs = reference(model, ids)
    out = os.path.join(work, "out.safetensors")
    good = True
    runs = [("one rank", whole, []), ("shards, " + " ".join(split), sharded, split)]
    if not class_name.startswith(("Granite", "Step3p7")):  # whose names in memory no checkpoint has
        runs.append(("fused experts, one rank", fused, []))
    for label, folder, plan in runs:
        try:
            good &= compare(label, run_step(hf_step, folder, prefix, out, plan), theirs, model)
        except RuntimeError as error:
            print(f"    WRONG {label}: {error}")
            good = False
    return good


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    hf_step, chosen = os.path.abspath(sys.argv[1]), sys.argv[2:] or list(CASES)
    torch.set_num_threads(2)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    failed = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as work:
            if not run_case(hf_step, name, work):
                failed.append(name)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases agree" + (f"; not: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
