"""Gated activations: ``act(gate) · up``, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "gated_act", "reference_gated_act"]

LIMIT = 7.0
"""Where gpt-oss' ``swiglu_clamped`` cuts gate and up, and ``silu_clamped`` does."""


def _swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    "swiglu_clamped": _swiglu_clamped,
    "silu_clamped": lambda gate, up: F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT),
}

ACTIVATIONS = tuple(_FUNCTIONS)


def gated_act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) · up``.

    Args:
        gate: ``(..., N)`` in float32, bfloat16 or float16; rows may lie apart, as in a half of a merged
            projection.
        up: as ``gate`` in shape and dtype.
        activation: one of :data:`ACTIVATIONS`.  ``gelu`` is the exact one, by erf; ``swiglu_clamped`` is
            gpt-oss' ``(up + 1) · gate · sigmoid(1.702 · gate)`` with gate at most 7 and up in −7 … 7;
            ``silu_clamped`` is ``silu(gate) · up`` of the same.

    Returns:
        A contiguous tensor of the shape and dtype of ``gate``.

    Raises:
        RuntimeError: shapes or dtypes differ, or the activation is unknown.
    """
    out: Tensor = torch.ops.armllm.gated_act(gate, up, activation)
    return out


def reference_gated_act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """:func:`gated_act` in plain torch, and in float64: torch's float32 GELU cancels in the left tail."""
    return _FUNCTIONS[activation](gate.double(), up.double()).to(gate.dtype)


@torch.library.register_fake("armllm::gated_act")
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)
