"""Fused gate and up projections with INT4 or INT8 weights, including the activation."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import fake, op
from torch_armllm.system.dtypes import dtype_name

__all__ = ["int4_gated_linear", "int4_gated_linear_q"]


@op(lambda a: a.x.new_empty((*a.x.shape[:-1], a.out_features)))
def int4_gated_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    digits: int = 1,
    rotated: bool = False,
) -> Tensor:
    """Computes ``act(x · Wgᵀ + bg) · (x · Wuᵀ + bu)``, the first half of a gated MLP.

    Args:
        x: ``(..., K)``, float32, bfloat16 or float16.
        weight: uint8 ``(2 · panels, panel_bytes)``, gate and up panels alternating; see
            :func:`interleave_panels`.
        out_features: N, the rows of gate alone.
        scheme: as in :func:`int4_linear`, or ``i8``.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``swiglu_clamped`` or
            ``silu_clamped`` (both clamp at 7), or ``silu_softcapped`` (both caps are 7).
        gate_bias: ``(N,)``, any of the float types.
        up_bias: ``(N,)``, in the dtype of ``gate_bias``.
        digits: as in :func:`int4_linear`.
        rotated: as in :func:`int4_linear`.

    Returns:
        ``(..., N)`` in the dtype of ``x``, rounded once from float32.

    Raises:
        RuntimeError: if shapes, dtypes, scheme or activation are invalid.
    """


def int4_gated_linear_q(
    q: Tensor,
    scales: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    activation: str = "silu",
    dtype: torch.dtype = torch.bfloat16,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Computes :func:`int4_gated_linear` from quantized activations; see :func:`int4_linear_q`."""
    result: Tensor = torch.ops.armllm.int4_gated_linear_q(
        q, scales, weight, out_features, scheme, activation, dtype_name(dtype), gate_bias, up_bias
    )
    return result


fake(
    "int4_gated_linear_q",
    lambda a: a.q.new_empty((*a.q.shape[:-1], a.out_features), dtype=getattr(torch, a.dtype)),
)
