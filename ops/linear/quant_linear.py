"""Linear layers with INT4 or INT8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.system.dtypes import dtype_name

__all__ = ["int4_linear", "int4_linear_q", "int8_linear"]


def int4_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``x · Wᵀ (+ bias) (+ residual)`` with INT4 weights (W4A8).

    Args:
        x: ``(..., K)``, float32, bfloat16 or float16.
        weight: uint8 ``(panels, panel_bytes)`` from :func:`pack_int4`; panels may lie further apart than they
            are long, so slices of a merged weight need no copy.
        out_features: N; the last panel may be partly empty.
        scheme: exact: ``g32i`` (integer group multipliers), ``row`` (one scale a row), ``rowz`` (and a zero
            point).  Float scales for groups of 32, 64 or 128: ``g32``, ``g64``, ``g128``; ``z`` appended
            means zero points, then ``b`` bfloat16 scales; ``m`` appended means a float offset a group, and
            ``int8`` before such a name (``int8g32``, ``int8g128m``) INT8 values.
        bias: ``(N,)``, any of the float types.
        residual: shape of the result, dtype of ``x``.

    Returns:
        ``(..., N)`` in the dtype of ``x``.  Exact schemes give the same bits for every kernel variant, batch
        size and thread count.  With float group scales, few tokens have integer sums within a group and float
        sums of groups; many tokens have the scales folded to INT8, at a relative error of a third of a per
        cent; of INT8 weights every batch has the same sums.  A row that holds a NaN or an infinity gives NaN.

    Raises:
        RuntimeError: shapes, dtypes or scheme do not fit the weight; the message says what was expected.

    Source: progressive group quantization, QServe (arXiv 2405.04532).
    """
    result: Tensor = torch.ops.armllm.int4_linear(x, weight, out_features, scheme, bias, residual)
    return result


def int4_linear_q(
    q: Tensor,
    scales: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`int4_linear` of activations that are quantized already.

    Args:
        q: int8 ``(..., round_up(K, 32))``, zeros behind K, as ``rms_norm_int8`` returns it.
        scales: float32 ``(...)``.
        weight: as of :func:`int4_linear`, or of :func:`int8_linear` with scheme ``i8``.
        out_features: N.
        scheme: as in :func:`int4_linear`, or ``i8``.
        dtype: of the result: float32, bfloat16 or float16.
        bias: ``(N,)``, any of the float types.
        residual: shape and dtype of the result.

    Returns:
        ``(..., N)``, the same bits as from activations that quantize to ``q`` and ``scales``.

    Raises:
        RuntimeError: shapes, dtypes or scheme do not fit.
    """
    result: Tensor = torch.ops.armllm.int4_linear_q(
        q, scales, weight, out_features, scheme, dtype_name(dtype), bias, residual
    )
    return result


def int8_linear(
    x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """:func:`int4_linear` with INT8 weights from :func:`pack_int8` (W8A8), one scale a row, exact."""
    result: Tensor = torch.ops.armllm.int8_linear(x, weight, out_features, bias, residual)
    return result


@torch.library.register_fake("armllm::int4_linear")
def _int4_linear_fake(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("armllm::int4_linear_q")
def _int4_linear_q_fake(
    q: Tensor,
    scales: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str,
    dtype: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    return q.new_empty((*q.shape[:-1], out_features), dtype=getattr(torch, dtype))


@torch.library.register_fake("armllm::int8_linear")
def _int8_linear_fake(
    x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
