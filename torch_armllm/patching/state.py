"""What a patched model carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch_armllm.patching.forward import PatchedForward
    from torch_armllm.quant.report import Report


STATE = "_armllm"
"""The attribute."""


@dataclass
class PatchState:
    """What `unpatch` must undo."""

    base: nn.Module
    forward: PatchedForward | None
    quantized: bool
    report: Report


def is_patched(model: nn.Module) -> bool:
    """Whether `patch` was called on this model."""
    return STATE in model.__dict__


def patched_forward(model: nn.Module) -> PatchedForward | None:
    """What stands for the forward of a patched model's body; None where the model could not be captured.

    Raises:
        ValueError: the model is not patched.
    """
    if not is_patched(model):
        raise ValueError(f"this {type(model).__name__} is not patched")
    state: PatchState = model.__dict__[STATE]
    return state.forward


def why_not_captured(model: nn.Module) -> str | None:
    """Why a patched model runs module by module; None if it does not."""
    state: PatchState = model.__dict__[STATE]
    return state.report.capture_reason
