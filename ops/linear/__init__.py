"""Quantised linear layers: INT4 or INT8 weights, activations quantised to INT8 per token inside the op."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.dense import dense_linear, reference_dense_linear
from torch_armllm.ops.linear.heads import (
    dense_heads_linear,
    int8_heads_linear,
    reference_dense_heads_linear,
    reference_int8_heads_linear,
)
from torch_armllm.ops.linear.layout import (
    EXACT,
    GROUP,
    PANEL,
    SCHEMES,
    PanelLayout,
    group_span,
    has_bf16_scales,
    has_zero_points,
    panel_count,
    panel_layout,
    unpack_int,
)
from torch_armllm.ops.linear.reference import (
    quantize_activations,
    reference_folded_linear,
    reference_int4_gated_linear,
    reference_int4_linear,
    reference_int8_linear,
    reference_int_linear,
)

__all__ = [
    "EXACT",
    "GROUP",
    "PANEL",
    "SCHEMES",
    "PanelLayout",
    "dense_heads_linear",
    "dense_linear",
    "group_span",
    "has_bf16_scales",
    "has_zero_points",
    "int4_gated_linear",
    "int4_gated_linear_q",
    "int4_linear",
    "int4_linear_q",
    "int8_heads_linear",
    "int8_linear",
    "interleave_panels",
    "pack_int4",
    "pack_int8",
    "panel_count",
    "panel_layout",
    "quantize_activations",
    "reference_dense_heads_linear",
    "reference_dense_linear",
    "reference_folded_linear",
    "reference_int4_gated_linear",
    "reference_int4_linear",
    "reference_int8_heads_linear",
    "reference_int8_linear",
    "reference_int_linear",
    "unpack_int",
    "unpack_weight",
]


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
            means zero points, then ``b`` bfloat16 scales.
        bias: ``(N,)``, any of the float types.
        residual: shape of the result, dtype of ``x``.

    Returns:
        ``(..., N)`` in the dtype of ``x``.  Exact schemes give the same bits for every kernel variant, batch
        size and thread count.  With float group scales, few tokens have integer sums within a group and float
        sums of groups; many tokens have the scales folded to INT8, at a relative error of a third of a per
        cent.  A row that holds a NaN or an infinity gives NaN.

    Raises:
        RuntimeError: shapes, dtypes or scheme do not fit the weight; the message says what was expected.

    Source: progressive group quantisation, QServe (arXiv 2405.04532).
    """
    result: Tensor = torch.ops.armllm.int4_linear(x, weight, out_features, scheme, bias, residual)
    return result


def int8_linear(
    x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """:func:`int4_linear` with INT8 weights from :func:`pack_int8` (W8A8), one scale a row, exact."""
    result: Tensor = torch.ops.armllm.int8_linear(x, weight, out_features, bias, residual)
    return result


def int4_gated_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str = "g32i",
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """``act(x · Wgᵀ + bg) · (x · Wuᵀ + bu)``: a gated MLP's first half in one op.

    Args:
        x: ``(..., K)``, float32, bfloat16 or float16.
        weight: uint8 ``(2 · panels, panel_bytes)``, gate and up panels alternating; see
            :func:`interleave_panels`.
        out_features: N of gate alone.
        scheme: as in :func:`int4_linear`; ``i8`` works too.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``swiglu_clamped`` or
            ``silu_clamped`` (both with limit 7).
        gate_bias: ``(N,)``, any of the float types.
        up_bias: ``(N,)``, in the dtype of ``gate_bias``.

    Returns:
        ``(..., N)`` in the dtype of ``x``; everything before the last rounding is float32.

    Raises:
        RuntimeError: shapes, dtypes, scheme or activation do not fit.
    """
    result: Tensor = torch.ops.armllm.int4_gated_linear(
        x, weight, out_features, scheme, activation, gate_bias, up_bias
    )
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
    """:func:`int4_linear` of activations that are quantised already.

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
        ``(..., N)``, the same bits as from activations that quantise to ``q`` and ``scales``.

    Raises:
        RuntimeError: shapes, dtypes or scheme do not fit.
    """
    result: Tensor = torch.ops.armllm.int4_linear_q(
        q, scales, weight, out_features, scheme, _name(dtype), bias, residual
    )
    return result


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
    """:func:`int4_gated_linear` of activations that are quantised already; see :func:`int4_linear_q`."""
    result: Tensor = torch.ops.armllm.int4_gated_linear_q(
        q, scales, weight, out_features, scheme, activation, _name(dtype), gate_bias, up_bias
    )
    return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pack_int4(
    q: Tensor,
    multipliers: Tensor | None,
    scales: Tensor,
    scheme: str = "g32i",
    zeros: Tensor | None = None,
) -> Tensor:
    """Packs plain INT4 weights into panels.

    Args:
        q: int8 ``(N, K)``, or ``(E, N, K)`` for experts, values -8..7, or 0..15 where there are zero points.
        multipliers: uint8 ``(..., N, ceil(K / 32))`` in 1..16 for scheme ``g32i``, else ``None``.
        scales: ``(..., N)``, or ``(..., N, ceil(K / span))`` for float groups of ``span`` columns; float32,
            or bfloat16 for schemes that end in ``b``.
        scheme: as in :func:`int4_linear`.
        zeros: uint8 in 0..15 and of the shape of ``scales``, for schemes with zero points, else ``None``: the
            weight is ``scale · (q - zero)``.

    Returns:
        uint8 ``(..., ceil(N / 16), panel_bytes)``.

    Raises:
        RuntimeError: a value, shape or dtype does not fit the scheme.
    """
    result: Tensor = torch.ops.armllm.pack_int4(q, multipliers, scales, scheme, zeros)
    return result


def pack_int8(q: Tensor, scales: Tensor) -> Tensor:
    """Packs INT8 weights ``(N, K)`` or ``(E, N, K)`` and float32 row scales; see :func:`pack_int4`."""
    result: Tensor = torch.ops.armllm.pack_int8(q, scales)
    return result


def unpack_weight(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The float32 weight ``(..., N, K)`` that a packed one stands for."""
    result: Tensor = torch.ops.armllm.unpack_weight(weight, out_features, in_features, scheme)
    return result


def interleave_panels(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up panels alternating, as :func:`int4_gated_linear` and the experts take them.

    Args:
        gate: uint8 ``(..., panels, panel_bytes)``.
        up: of the same shape.

    Returns:
        uint8 ``(..., 2 · panels, panel_bytes)``.

    Raises:
        ValueError: the two differ in shape.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}: they must agree")
    return torch.stack((gate, up), -2).flatten(-3, -2)


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


@torch.library.register_fake("armllm::int8_linear")
def _int8_linear_fake(
    x: Tensor, weight: Tensor, out_features: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("armllm::int4_gated_linear")
def _int4_gated_linear_fake(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str,
    activation: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
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


@torch.library.register_fake("armllm::int4_gated_linear_q")
def _int4_gated_linear_q_fake(
    q: Tensor,
    scales: Tensor,
    weight: Tensor,
    out_features: int,
    scheme: str,
    activation: str,
    dtype: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    return q.new_empty((*q.shape[:-1], out_features), dtype=getattr(torch, dtype))


@torch.library.register_fake("armllm::pack_int4")
def _pack_int4_fake(
    q: Tensor, multipliers: Tensor | None, scales: Tensor, scheme: str, zeros: Tensor | None = None
) -> Tensor:
    layout = panel_layout(scheme, int(q.shape[-1]))
    return q.new_empty((*q.shape[:-2], panel_count(int(q.shape[-2])), layout.bytes), dtype=torch.uint8)


@torch.library.register_fake("armllm::pack_int8")
def _pack_int8_fake(q: Tensor, scales: Tensor) -> Tensor:
    packed: Tensor = _pack_int4_fake(q, None, scales, "i8")
    return packed


@torch.library.register_fake("armllm::unpack_weight")
def _unpack_weight_fake(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    return weight.new_empty((*weight.shape[:-2], out_features, in_features), dtype=torch.float32)
