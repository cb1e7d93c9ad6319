"""Conversion of plain quantized weights to packed panels, and back to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.linear.packed_layout import panel_count, panel_layout

__all__ = ["interleave_panels", "pack_int4", "pack_int8", "unpack_weight"]


def interleave_panels(gate: Tensor, up: Tensor) -> Tensor:
    """Interleaves gate and up panels for :func:`int4_gated_linear` and the experts.

    Args:
        gate: uint8 ``(..., panels, panel_bytes)``.
        up: the same shape.

    Returns:
        uint8 ``(..., 2 · panels, panel_bytes)``.

    Raises:
        ValueError: if the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}: they must be equal")
    return torch.stack((gate, up), -2).flatten(-3, -2)


def _panels(q: Tensor, scheme: str) -> Tensor:
    layout = panel_layout(scheme, int(q.shape[-1]))
    return q.new_empty((*q.shape[:-2], panel_count(q.shape[-2]), layout.bytes), dtype=torch.uint8)


@op(lambda a: _panels(a.q, a.scheme))
def pack_int4(
    q: Tensor,
    multipliers: Tensor | None,
    scales: Tensor,
    scheme: str = "g32i",
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Packs plain weights of 3 to 6 bits, or INT8 ones with group scales, into panels.

    Args:
        q: int8 ``(N, K)``, or ``(E, N, K)`` for experts, in `SchemeTraits.values`.
        multipliers: ``(..., N, ceil(K / 32))`` in `SchemeTraits.multipliers`: uint8, or int8 for ``int3``,
            which has signs; ``None`` for schemes that have none.
        scales: ``(..., N)``, or ``(..., N, ceil(K / span))`` for float groups of ``span`` columns; float32,
            or bfloat16 for schemes that end in ``b``.
        scheme: as in :func:`int4_linear`.
        zeros: uint8 in 0..15 in the shape of ``scales`` for schemes with zero points, otherwise ``None``; the
            weight is ``scale · (q - zero)``; in 6..9 and in the shape of ``multipliers`` for ``g32iz``, whose
            weight is ``scale · multiplier · (q - zero)``.
        offsets: float32 in the shape of ``scales`` for schemes with an ``m``, otherwise ``None``; the weight
            is ``scale · q + offset``.

    Returns:
        uint8 ``(..., ceil(N / 16), panel_bytes)``.

    Raises:
        RuntimeError: if a value, shape or dtype is invalid for the scheme.
    """


@op(lambda a: _panels(a.q, "i8"))
def pack_int8(q: Tensor, scales: Tensor) -> Tensor:
    """Packs INT8 weights ``(N, K)`` or ``(E, N, K)`` and float32 row scales; see :func:`pack_int4`."""


@op(lambda a: a.weight.new_empty((*a.weight.shape[:-2], a.out_features, a.in_features), dtype=torch.float32))
def unpack_weight(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Returns the float32 weight ``(..., N, K)`` that a packed weight represents."""
