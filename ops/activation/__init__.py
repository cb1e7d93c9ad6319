"""Gated activations: ``act(gate) · up``, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.tables import ENUMS

__all__ = ["ACTIVATIONS", "FUNCTIONS", "gated_act", "reference_gated_act"]

LIMIT = 7.0
"""Clamping limit of ``swiglu_clamped``, as in gpt-oss, and of ``silu_clamped``; caps of
``silu_softcapped``."""
ACTIVATIONS = tuple(name for name in ENUMS["Activation"] if name != "none")


def _swiglu_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _silu_softcapped(gate: Tensor, up: Tensor, limit: float, up_limit: float) -> Tensor:
    capped = limit * torch.tanh(gate / limit) * (up_limit * torch.tanh(up / up_limit))
    return capped * torch.sigmoid(gate)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "silu": lambda gate, up, limit, up_limit: F.silu(gate) * up,
    "gelu": lambda gate, up, limit, up_limit: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, limit, up_limit: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up, limit, up_limit: F.relu(gate) * up,
    "swiglu_clamped": lambda gate, up, limit, up_limit: _swiglu_clamped(gate, up, limit),
    "silu_clamped": lambda gate, up, limit, up_limit: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit),
    "silu_softcapped": _silu_softcapped,
}
"""Each activation in plain torch, as a function of gate, up, limit and up_limit.

Only clamped and softcapped activations use limit, and only the latter use up_limit."""
assert tuple(FUNCTIONS) == ACTIVATIONS


@op(lambda a: a.gate.new_empty(a.gate.shape))
def gated_act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Computes ``act(gate) · up``.

    Args:
        gate: ``(..., N)`` in float32, bfloat16 or float16; rows may be strided, as in one half of a merged
            projection.
        up: same shape and dtype as ``gate``.
        activation: one of :data:`ACTIVATIONS`.  ``gelu`` is the exact form with erf.  ``swiglu_clamped`` is
            gpt-oss' ``(up + 1) · gate · sigmoid(1.702 · gate)`` with gate at most 7 and up in −7 … 7.
            ``silu_clamped`` is ``silu(gate) · up`` with the same clamping.  ``silu_softcapped`` is
            ``cap(gate) · sigmoid(gate) · cap(up)`` with ``cap(x) = 7 · tanh(x / 7)``.

    Returns:
        A contiguous tensor of the shape and dtype of ``gate``.

    Raises:
        RuntimeError: shapes or dtypes differ, or the activation is unknown.
    """


def reference_gated_act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """:func:`gated_act` in plain torch, in float64 because torch's float32 GELU cancels in the left tail."""
    return FUNCTIONS[activation](gate.double(), up.double(), LIMIT, LIMIT).to(gate.dtype)
