"""Constructs configurations with the installed megatron-core and says, line by line, which of them it refuses.

usage: oracle.py [--transformer-engine VERSION] DOCUMENTS.json

DOCUMENTS.json is a list of {"class", "kwargs"}, or one such document, as `launch --megatron-core` writes it. For each
one line is printed: `constructed`, or the exception's class and the first line of its message. Without the package the
exit status is 77, which test runners count as skipped. Nothing runs on a GPU and Transformer Engine is not needed: the
version that a release ships is stated instead, and the kernels of it that a configuration asks for by name are taken as
present.
"""

import argparse
import importlib
import json
import sys
import types
import warnings

SKIPPED = 77


def resolved(value):
    """A dotted name such as "torch.bfloat16" as the object that it names."""
    if isinstance(value, list):
        return [resolved(one) for one in value]
    if not isinstance(value, str) or not value.startswith(("torch.", "megatron.")):
        return value
    module, _, name = value.rpartition(".")
    return getattr(importlib.import_module(module), name)


def state_transformer_engine(version):
    """Lets megatron-core see a Transformer Engine of that version, of which it asks only the version here."""
    from packaging.version import Version

    import megatron.core.utils as utils

    utils._te_version = Version(version)
    places = [utils] + [module for name, module in sys.modules.items() if name.startswith("megatron.") and module]
    for place in places:
        if hasattr(place, "get_te_version"):
            place.get_te_version = lambda: Version(version)
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ):
        if getattr(moe_utils, name, None) is None:
            setattr(moe_utils, name, object())
    from megatron.core.models.common.embeddings import rope_utils

    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        if getattr(rope_utils, name, None) is None:
            setattr(rope_utils, name, object())
    # OptimizerConfig looks at the arguments of Transformer Engine's optimizer.
    if "transformer_engine" not in sys.modules:
        optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")

        class FusedAdam:
            def __init__(self, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad):
                raise NotImplementedError("stands for its arguments only")

        optimizers.FusedAdam = FusedAdam
        pytorch = types.ModuleType("transformer_engine.pytorch")
        pytorch.optimizers = optimizers
        package = types.ModuleType("transformer_engine")
        package.pytorch = pytorch
        package.__version__ = version
        sys.modules.update(
            {
                "transformer_engine": package,
                "transformer_engine.pytorch": pytorch,
                "transformer_engine.pytorch.optimizers": optimizers,
            }
        )


def cannot_compile(*_, **__):
    raise RuntimeError("nothing is compiled here")


def classes():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import transformer_config

    return {
        "TransformerConfig": transformer_config.TransformerConfig,
        "MLATransformerConfig": transformer_config.MLATransformerConfig,
        "OptimizerConfig": OptimizerConfig,
        "DistributedDataParallelConfig": DistributedDataParallelConfig,
    }


def installed():
    """The release of the package. In a Git checkout 0.19 adds the checkout's commit behind a plus."""
    from megatron.core import __version__ as version

    return version.split("+")[0]


def load(transformer_engine):
    """The configuration classes, with Transformer Engine's version stated; exits where there is no package."""
    warnings.simplefilter("ignore")
    try:
        import torch.utils.cpp_extension

        # megatron-core 0.15 compiles an allocator for GPUs as it is imported, and goes on where that fails.
        torch.utils.cpp_extension.load_inline = cannot_compile
        import megatron.core  # noqa: F401
    except ImportError as missing:
        print(f"skipped: megatron-core is not installed ({missing})")
        sys.exit(SKIPPED)
    known = classes()
    state_transformer_engine(transformer_engine)
    return known


def verdict(known, document):
    """None where the configuration is constructed, else what it was refused with."""
    try:
        known[document["class"]](**{name: resolved(value) for name, value in document["kwargs"].items()})
    except Exception as refused:  # Any exception of the class is a refusal.
        return f"{type(refused).__name__}: {(str(refused).strip() or 'no message').splitlines()[0]}"
    return None


def main():
    parser = argparse.ArgumentParser(description="Which configurations megatron-core refuses.")
    parser.add_argument("--transformer-engine", default="2.17", help="the version that the release ships")
    parser.add_argument("documents")
    arguments = parser.parse_args()
    known = load(arguments.transformer_engine)
    with open(arguments.documents, encoding="utf-8") as file:
        documents = json.load(file)
    for document in documents if isinstance(documents, list) else [documents]:
        print(verdict(known, document) or "constructed")


if __name__ == "__main__":
    main()
