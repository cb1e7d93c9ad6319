"""Linear layers with INT4 or INT8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import fake, op
from torch_armllm.system.dtypes import dtype_name

__all__ = ["int4_linear", "int4_linear_q", "int8_linear"]


@op(lambda a: a.x.new_empty((*a.x.shape[:-1], a.out_features)))
def int4_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    digits: int = 1,
    rotated: bool = False,
) -> Tensor:
    """Computes ``x · Wᵀ (+ bias) (+ residual)`` with INT4 weights (W4A8).

    Args:
        x: ``(..., K)``, float32, bfloat16 or float16.
        weight: uint8 ``(panels, panel_bytes)`` from :func:`pack_int4`; panels may be strided, so slices of a
            merged weight need no copy.
        out_features: N; the last panel may be partial.
        scheme: exact schemes are ``g32i`` (integer group multipliers), ``g32iz`` (the same with a zero point
            for each group), ``int6`` and ``int3`` (multipliers, 6 and 3 bits), ``row`` (one scale per row)
            and ``rowz`` (the same with zero points).  ``g32``, ``g64`` and ``g128`` have float scales for
            groups of 32, 64 or 128 columns.  Suffix ``z`` adds zero points, ``b`` stores bfloat16 scales,
            ``m`` adds a float offset per group; prefix ``int8`` (``int8g32``, ``int8g128m``) means INT8
            values.
        bias: ``(N,)``, any of the float types.
        residual: added to the result; its shape, and the dtype of ``x``.
        digits: 1 or 2 INT8 digits of each activation.  The second holds the rounding errors of the first,
            with a scale of its own: about 15 bits together, for twice the arithmetic.
        rotated: each group of 32 activations is multiplied by a Hadamard matrix before it is quantized, as
            the weight was (see :func:`rotate_groups`); K is a multiple of 32.

    Returns:
        ``(..., N)`` in the dtype of ``x``.  Exact schemes return the same bits for every kernel variant,
        batch size and thread count.  With float group scales, few tokens use integer sums within a group
        and float sums of groups; for many tokens the scales are folded to INT8, at a relative error of a
        third of a percent.  INT8 weights use the same sums for every batch size.  A row that holds a NaN or
        an infinity results in NaN.

    Raises:
        RuntimeError: if shapes, dtypes or scheme do not match the weight; the message says how.

    Source: progressive group quantization, QServe (arXiv 2405.04532).
    """


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
    """Computes :func:`int4_linear` from activations that are quantized already.

    Args:
        q: int8 ``(..., round_up(K, 32))`` in −127 … 127, zeros past K, as ``rms_norm_int8`` returns it.  With
            −128, a row's bits depend on the number of rows.
        scales: float32 ``(...)``.
        weight: as in :func:`int4_linear`, or as in :func:`int8_linear` for scheme ``i8``.
        out_features: N.
        scheme: as in :func:`int4_linear`, or ``i8``.
        dtype: dtype of the result: float32, bfloat16 or float16.
        bias: ``(N,)``, any of the float types.
        residual: in the shape and dtype of the result.

    Returns:
        ``(..., N)``; the same bits as for activations that quantize to ``q`` and ``scales``.

    Raises:
        RuntimeError: if shapes, dtypes or scheme do not match.
    """
    result: Tensor = torch.ops.armllm.int4_linear_q(
        q, scales, weight, out_features, scheme, dtype_name(dtype), bias, residual
    )
    return result


fake(
    "int4_linear_q",
    lambda a: a.q.new_empty((*a.q.shape[:-1], a.out_features), dtype=getattr(torch, a.dtype)),
)


@op(lambda a: a.x.new_empty((*a.x.shape[:-1], a.out_features)))
def int8_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    digits: int = 1,
    rotated: bool = False,
) -> Tensor:
    """Computes :func:`int4_linear` with INT8 weights from :func:`pack_int8` (W8A8, exact)."""
