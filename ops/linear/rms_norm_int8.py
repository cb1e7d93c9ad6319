"""Fused RMSNorm and INT8 quantization for the next quantized linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.linear.reference import quantize_activations
from torch_armllm.ops.norm import reference_rms_norm


def _rms_norm_int8_result(a: Any) -> Any:
    padded = (a.x.shape[-1] + 31) // 32 * 32
    return (
        a.x.new_empty((*a.x.shape[:-1], padded), dtype=torch.int8),
        a.x.new_empty(a.x.shape[:-1], dtype=torch.float32),
        a.x.new_empty(0 if a.residual is None else a.x.shape),
    )


@op(_rms_norm_int8_result)
def rms_norm_int8(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`rms_norm` and quantizes the rows to INT8 without storing them.

    Args:
        x: ``(..., N)`` in float32, bfloat16 or float16.
        weight: ``(N,)`` in any of these dtypes.
        eps: added to the mean square.
        weight_offset: 1 for Gemma's ``1 + w``.
        residual: added to ``x`` first, as in :func:`add_rms_norm`.

    Returns:
        int8 ``(..., round_up(N, 32))``, zeros past N; float32 scales ``(...)``, NaN if the norm of a row
        holds a NaN or an infinity; and the sum of ``x`` and ``residual``, or ``(0,)`` without a residual.
        The bits equal those of the norm, rounding to the dtype of ``x``, and quantization.

    Raises:
        RuntimeError: if shapes or dtypes do not match.
    """


def reference_rms_norm_int8(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`rms_norm_int8` in float32 PyTorch."""
    total = x if residual is None else x + residual
    q, scales = quantize_activations(reference_rms_norm(total, weight, eps, weight_offset))
    padded = torch.nn.functional.pad(q, (0, -q.shape[-1] % 32))
    return padded, scales[..., 0], x.new_empty(0) if residual is None else total
