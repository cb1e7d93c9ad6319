"""Copies of a patched model: they have modules and weights of their own, and no plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from torch_armllm.patching.module_fallback import ModuleFallback
from torch_armllm.patching.state import STATE

GET_STATE = "__getstate__"
"""What ``copy``, ``pickle``, ``torch.save`` and processes that are spawned ask an object for."""


def keep_apart(modules: Iterable[nn.Module | None]) -> None:
    """Makes copies of modules with plans run by their modules, and lets changed modules leave their plan.

    A plan reads the memory of the weights that it was made from, so a copy of it would compute with those.
    """
    for module in modules:
        if module is not None:
            forward = module.__dict__.get("forward")
            if isinstance(forward, ModuleFallback):
                forward.watch()
            module.__dict__[GET_STATE] = partial(_state_of, module)


def _state_of(module: nn.Module) -> dict[str, Any]:
    if STATE in module.__dict__:
        warnings.warn(
            f"torch_armllm: a copy of a patched {type(module).__name__}, also in a file of torch.save or pickle, "
            "runs module by module: call torch_armllm.patch(copy) to get a plan of it; save_pretrained "
            "writes a folder that torch_armllm.load reads",
            stacklevel=4,
        )
    return {
        name: value for name, value in module.__dict__.items() if name != STATE and not _is_of_plan(name, value)
    }


def _is_of_plan(name: str, value: Any) -> bool:
    if name not in ("forward", "generate", GET_STATE):
        return False
    made_by = getattr(value, "func", value)
    kind = type(made_by).__module__ if not hasattr(made_by, "__code__") else made_by.__code__.co_filename
    return "torch_armllm" in kind
