"""Passes the arguments of a plan to Megatron-LM's own parser and checks, as far as they run without a GPU.

Only causes in the environment are stood in for: the compute capability of the GPU, the number of processes, and
`typing.override`, which Python has since 3.12. It needs a wheel that holds megatron/training (0.17 or later).
"""

import contextlib
import io
import os
import sys
import typing

CAPABILITY = {"hopper": (9, 0), "blackwell": (10, 0)}


def prepared(generation):
    """Megatron-LM's module of arguments, which sees a GPU of that generation."""
    import typing_extensions

    capability = CAPABILITY[generation]
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    import torch

    torch.cuda.get_device_capability = lambda *_: capability
    import megatron.core.utils

    megatron.core.utils.get_device_arch_version = lambda: capability[0]
    import megatron.training.arguments as training

    training.get_device_arch_version = lambda: capability[0]
    return training


def check(generation, words, gpus, environment, configured=None):
    """None where parse_args and validate_args take the arguments, else what they refused them with.

    To a list `configured` the configuration is added that Megatron-LM makes of the arguments, which checks them too.
    """
    training = prepared(generation)
    kept, argv = dict(os.environ), sys.argv
    os.environ.update({"WORLD_SIZE": str(gpus), "RANK": "0", "LOCAL_RANK": "0", **environment})
    sys.argv = ["pretrain_gpt.py", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            given = training.validate_args(training.parse_args())
            if configured is not None:
                from megatron.training.argument_utils import core_transformer_config_from_args

                configured.append(core_transformer_config_from_args(given))
    except SystemExit:
        return "parse_args: " + said.getvalue().strip().splitlines()[-1]
    except Exception as refused:  # Any exception of the checks is a refusal.
        return f"{type(refused).__name__}: {(str(refused).strip() or 'no message').splitlines()[0]}"
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(kept)
    return None
