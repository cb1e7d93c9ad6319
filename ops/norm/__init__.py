"""RMSNorm and LayerNorm over the last dimension, alone or after a residual add.

Everything between the input and the output's rounding is float32.  The forms with a residual add round the
sum to the dtype first, because the model's residual stream is that rounded sum, and normalise
that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.reference import quantize_activations

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "reference_layer_norm",
    "reference_rms_norm_int8",
    "rms_norm",
    "rms_norm_int8",
    "reference_rms_norm",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + weight_offset)`` (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16; rows may lie apart, as in a slice of merged
            projections.
        weight: ``(N,)`` in any of these dtypes.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    out: Tensor = torch.ops.armllm.rms_norm(x, weight, eps, weight_offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of ``x + residual``.

    Args:
        x: ``(..., N)``.
        residual: as ``x`` in shape and dtype.
        weight: ``(N,)``.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.

    Returns:
        The normalised sum, and the sum itself, both in the dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    out, total = torch.ops.armllm.add_rms_norm(x, residual, weight, eps, weight_offset)
    return out, total


def rms_norm_int8(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm`, quantised to INT8 as the quantised linear layers do it, without the rows in between.

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16.
        weight: ``(N,)`` in any of these dtypes.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.
        residual: added to ``x`` first, as by :func:`add_rms_norm`.

    Returns:
        int8 ``(..., round_up(N, 32))``, zeros behind N; float32 scales ``(...)``, NaN where the norm of a row
        holds a NaN or an infinity; and the sum of ``x`` and ``residual``, or ``(0,)`` without one.  The same
        bits as of norm, rounding to the dtype of ``x``, and quantisation.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    q, scales, total = torch.ops.armllm.rms_norm_int8(x, weight, eps, weight_offset, residual)
    return q, scales, total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x − mean) / sqrt(variance + eps) · weight + bias`` (Ba et al., arXiv 1607.06450).

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16.
        weight: ``(N,)`` or None for one.
        bias: ``(N,)`` in the dtype of ``weight``, or None for zero.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    out: Tensor = torch.ops.armllm.layer_norm(x, weight, bias, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`layer_norm` of ``x + residual``; returns the normalised sum and the sum, in the dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    out, total = torch.ops.armllm.add_layer_norm(x, residual, weight, bias, eps)
    return out, total


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """:func:`rms_norm` in plain float32 torch."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + weight_offset)).to(x.dtype)


def reference_rms_norm_int8(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm_int8` in plain float32 torch."""
    total = x if residual is None else x + residual
    q, scales = quantize_activations(reference_rms_norm(total, weight, eps, weight_offset))
    padded = torch.nn.functional.pad(q, (0, -q.shape[-1] % 32))
    return padded, scales[..., 0], x.new_empty(0) if residual is None else total


def reference_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """:func:`layer_norm` in plain float32 torch."""
    wide = [None if p is None else p.float() for p in (weight, bias)]
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], wide[0], wide[1], eps).to(x.dtype)


@torch.library.register_fake("armllm::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("armllm::add_rms_norm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("armllm::rms_norm_int8")
def _(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    padded = (x.shape[-1] + 31) // 32 * 32
    return (
        x.new_empty((*x.shape[:-1], padded), dtype=torch.int8),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
    )


@torch.library.register_fake("armllm::layer_norm")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("armllm::add_layer_norm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
