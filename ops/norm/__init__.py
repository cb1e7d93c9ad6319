"""RMSNorm and LayerNorm over the last dimension, optionally after a residual add.

All arithmetic is float32; the output is rounded once.  The ops with a residual add first round the sum to the
dtype and then normalize the rounded sum, because that is the model's residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "reference_layer_norm",
    "rms_norm",
    "reference_rms_norm",
]


@op(lambda a: a.x.new_empty(a.x.shape))
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Computes ``x / sqrt(mean(x²) + eps) · (weight + weight_offset)`` (Zhang, Sennrich, arXiv 1910.07467).

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16; rows may be strided, as in a slice of merged
            projections.
        weight: ``(N,)`` in any of these dtypes.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """


@op(lambda a: (a.x.new_empty(a.x.shape), a.x.new_empty(a.x.shape)))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of ``x + residual``.

    Args:
        x: ``(..., N)``.
        residual: same shape and dtype as ``x``.
        weight: ``(N,)``.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.

    Returns:
        The normalized sum, and the sum itself, both in the dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """


@op(lambda a: a.x.new_empty(a.x.shape))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Computes ``(x − mean) / sqrt(variance + eps) · weight + bias`` (Ba et al., arXiv 1607.06450).

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16.
        weight: ``(N,)``, or None for a factor of 1.
        bias: ``(N,)`` in the dtype of ``weight``, or None for 0.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """


@op(lambda a: (a.x.new_empty(a.x.shape), a.x.new_empty(a.x.shape)))
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`layer_norm` of ``x + residual``; returns the normalized sum and the sum, in the dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """:func:`rms_norm` in plain float32 torch."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + weight_offset)).to(x.dtype)


def reference_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """:func:`layer_norm` in plain float32 torch."""
    wide = [None if p is None else p.float() for p in (weight, bias)]
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], wide[0], wide[1], eps).to(x.dtype)
