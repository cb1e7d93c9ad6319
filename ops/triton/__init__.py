"""Ops as Triton kernels: the kernel variant ``triton``, a place to try a kernel before it is written by hand.

`torch_armllm.ops.variants` imports this package where the variant is selected, and never otherwise.  An op in
:data:`OPS` then calls its Triton kernel from wherever it is called as an op.  Plans call the compiled kernels
directly and do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_armllm.ops.triton.backend import find_backend

BACKEND = find_backend()

from torch_armllm.ops.triton.activation import gated_act  # noqa: E402
from torch_armllm.ops.triton.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm  # noqa: E402
from torch_armllm.ops.triton.rope import rope_  # noqa: E402

__all__ = ["BACKEND", "FAMILIES", "OPS", "register"]

OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
    "add_layer_norm": add_layer_norm,
    "rope_": rope_,
    "gated_act": gated_act,
}
"""Functions with an op's signature, by the op's name."""
FAMILIES = ("norm", "rope", "activation")
"""Families of kernels to which these ops belong."""


def register() -> torch.library.Library:
    """Puts the functions of :data:`OPS` in the place of the compiled ops; destroying the result undoes it."""
    library = torch.library.Library("armllm", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # of overridden ones
        for name, function in OPS.items():
            library.impl(name, function, "CPU")
    return library
