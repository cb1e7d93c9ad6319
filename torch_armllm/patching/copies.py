"""Copies of a patched model: they have modules and weights of their own, and no plan."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from torch import nn

from torch_armllm.hf.replacements import Replacements
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.state import STATE, why_not_captured

_GET_STATE = "__getstate__"
"""The method that ``copy``, ``pickle``, ``torch.save`` and processes that are spawned call."""


def keep_apart(replaced: Replacements) -> None:
    """Makes copies of patched modules run without the plan, and changed modules leave it.

    A plan reads the memory of the weights that it was made from, so a copy of it would compute with those.

    Args:
        replaced: all that a patch has put in the place of something.
    """
    for module in replaced.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PatchedForward):
            forward.watch()
        replaced.put(module, _GET_STATE, partial(_state_of, module, replaced))


def _state_of(module: nn.Module, replaced: Replacements) -> dict[str, Any]:
    if STATE in module.__dict__ and why_not_captured(module) is None:
        warnings.warn(
            f"torch_armllm: a copy of a patched {type(module).__name__}, also one by pickle or torch.save, "
            "runs module by module: call torch_armllm.patch(copy) to get a plan of it; save_pretrained "
            "writes a folder that torch_armllm.load reads",
            stacklevel=3,
        )
    return replaced.attributes_before(module)
