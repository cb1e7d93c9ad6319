"""The packed weight panel seen from Python; ``packed_panel.h`` describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 16
GROUP = 32
SCHEMES = {
    "g32i": 0,
    "row": 1,
    "rowz": 9,
    "i8": 3,
    "g32": 2,
    "g64": 4,
    "g128": 5,
    "g32z": 10,
    "g64z": 12,
    "g128z": 13,
    "g32b": 18,
    "g64b": 20,
    "g128b": 21,
    "g32zb": 26,
    "g64zb": 28,
    "g128zb": 29,
    "g32m": 34,
    "g64m": 36,
    "g128m": 37,
    "int8g32": 66,
    "int8g64": 68,
    "int8g128": 69,
    "int8g32m": 98,
    "int8g64m": 100,
    "int8g128m": 101,
}
"""Every scheme and its number among the kernels."""
EXACT = ("g32i", "row", "rowz", "i8")
"""Schemes whose sums are integers to the end: the same bits in every variant and batch."""


@dataclass(frozen=True)
class PanelLayout:
    """Byte offsets inside one panel of 16 output rows.

    Attributes:
        groups: groups of 32 columns.
        span: columns of a float group scale; 0 where a row has one scale.
        scale_groups: scales a row.
        scales, offsets, multipliers, zero_points, values: where each section begins, whether the scheme has
            it or not; of INT8 with group scales, ``scales`` and ``values`` are the groups' panels.
        bytes: of the whole panel.
    """

    groups: int
    span: int
    scale_groups: int
    scales: int
    offsets: int
    multipliers: int
    zero_points: int
    values: int
    bytes: int


def group_span(scheme: str) -> int:
    """Columns that share a float scale: 32, 64 or 128, and 0 for schemes with one scale a row.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}; there are: {', '.join(SCHEMES)}")
    return 0 if scheme in EXACT else int(scheme.removeprefix("int8")[1:].rstrip("zbm"))


def has_zero_points(scheme: str) -> bool:
    """Whether the values are 0..15 less a zero point."""
    return SCHEMES[scheme] & 8 != 0


def has_bf16_scales(scheme: str) -> bool:
    """Whether the group scales are bfloat16."""
    return SCHEMES[scheme] & 16 != 0


def has_offsets(scheme: str) -> bool:
    """Whether every group has a float that its values are off by: ``scale · q + offset``."""
    return SCHEMES[scheme] & 32 != 0


def is_int8(scheme: str) -> bool:
    """Whether the values take eight bits."""
    return scheme == "i8" or scheme.startswith("int8")


def panel_layout(scheme: str, in_features: int) -> PanelLayout:
    """Describes the panels of a weight with ``in_features`` columns.

    Raises:
        ValueError: the scheme is unknown.
    """
    span = group_span(scheme)
    groups = -(-in_features // GROUP)
    scale_groups = -(-groups * GROUP // span) if span else 1
    if is_int8(scheme) and span:
        start = scale_groups * PANEL * 4 if has_offsets(scheme) else 0
        total = start + scale_groups * PANEL * 4 + groups * 512
        return PanelLayout(groups, span, scale_groups, start, 0, start, start, start, total)
    sections = offsets = at = PANEL * 4
    if span:
        at = sections = offsets = at + _lines(scale_groups * PANEL * (2 if has_bf16_scales(scheme) else 4))
    if has_offsets(scheme):
        at = sections = at + scale_groups * PANEL * 4
    if scheme == "g32i":
        at += _lines(groups * 8)
    if has_zero_points(scheme):
        at += _lines(scale_groups * 8)
    total = at + groups * (512 if scheme == "i8" else 256)
    return PanelLayout(groups, span, scale_groups, PANEL * 4, offsets, sections, sections, at, total)


def panel_count(out_features: int) -> int:
    """Panels that ``out_features`` rows take."""
    return -(-out_features // PANEL)


def unpack_values(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The quantized values q of a packed weight, before any zero point, scale or multiplier.

    Args:
        weight: uint8 ``(panels, panel_bytes)``.
        out_features: rows N of the weight.
        in_features: columns K of the weight.
        scheme: the one it was packed with.

    Returns:
        int8 ``(N, K)``; 0..15 for schemes with zero points, else -8..7, or -128..127 for INT8.
    """
    layout = panel_layout(scheme, in_features)
    panels = panel_count(out_features)
    if is_int8(scheme) and layout.span:
        parts = [
            unpack_values(part, out_features, part.shape[1] // 512 * GROUP, "i8")
            for part in _int8_panels(weight, layout)
        ]
        return torch.cat(parts, 1)[:, :in_features].contiguous()
    values = weight[:, layout.values : layout.bytes].contiguous()
    if scheme == "i8":
        lines = values.view(torch.int8).view(panels, layout.groups * 8, PANEL, 4)
    else:
        pairs = values.view(panels, layout.groups * 4, PANEL // 2, 8)
        lines = torch.cat((pairs & 15, (pairs >> 4) ^ 8), 2).to(torch.int8)
        if not has_zero_points(scheme):
            lines = lines - 8
    rows = lines.permute(0, 2, 1, 3).reshape(panels * PANEL, layout.groups * GROUP)
    return rows[:out_features, :in_features].contiguous()


def unpack_multipliers(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    """The multipliers of scheme g32i: uint8 ``(out_features, groups)`` in 1..16."""
    layout = panel_layout("g32i", in_features)
    return _unpack_nibbles(weight, layout.multipliers, layout.groups, out_features) + 1


def unpack_zero_points(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The zero points of schemes that have them: uint8 ``(out_features, scales a row)`` in 0..15."""
    layout = panel_layout(scheme, in_features)
    return _unpack_nibbles(weight, layout.zero_points, layout.scale_groups, out_features)


def unpack_scales(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The scales: float32 ``(out_features,)``, or ``(out_features, scales a row)`` of float groups."""
    layout = panel_layout(scheme, in_features)
    if is_int8(scheme) and layout.span:
        parts = [part[:, : PANEL * 4] for part in _int8_panels(weight, layout)]
        return _float_section(torch.cat(parts, 1), 0, layout, out_features)
    start = layout.scales if layout.span else 0
    dtype = torch.bfloat16 if has_bf16_scales(scheme) else torch.float32
    section = weight[:, start : start + layout.scale_groups * PANEL * dtype.itemsize].contiguous()
    scales = section.view(dtype).view(-1, layout.scale_groups, PANEL).to(torch.float32)
    rows = scales.permute(0, 2, 1).reshape(-1, layout.scale_groups)[:out_features].contiguous()
    return rows if layout.span else rows[:, 0].contiguous()


def unpack_offsets(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The offsets of schemes that have them: float32 ``(out_features, scales a row)``."""
    layout = panel_layout(scheme, in_features)
    return _float_section(weight, layout.offsets, layout, out_features)


def unpack_int(weight: Tensor, out_features: int, in_features: int, scheme: str) -> tuple[Tensor, Tensor]:
    """A packed weight of an exact scheme (g32i, row, rowz, i8) as integers and one scale a row.

    Returns:
        ``w`` int8 ``(out_features, in_features)`` and ``row_scale`` float32 ``(out_features,)``: the weight
        is their product.

    Raises:
        ValueError: a scheme with float group scales.
    """
    if group_span(scheme):
        raise ValueError(f"scheme {scheme!r} has float group scales and no integer form; use unpack_weight")
    w = unpack_values(weight, out_features, in_features, scheme)
    if scheme == "g32i":
        multipliers = unpack_multipliers(weight, out_features, in_features)
        w = w * multipliers.to(torch.int8).repeat_interleave(GROUP, 1)[:, :in_features]
    elif has_zero_points(scheme):
        w = w - unpack_zero_points(weight, out_features, in_features, scheme).to(torch.int8)
    return w, unpack_scales(weight, out_features, in_features, scheme)


def unpack_groups(weight: Tensor, out_features: int, in_features: int, scheme: str) -> tuple[Tensor, Tensor]:
    """A packed weight with float group scales as integers and scales.

    Returns:
        ``w`` int8 ``(out_features, S, span)``, q less its zero point, padded with zeros, and ``scales``
        float32 ``(out_features, S)``.

    Raises:
        ValueError: a scheme without float group scales.
    """
    span = group_span(scheme)
    if not span:
        raise ValueError(f"scheme {scheme!r} has one scale a row; use unpack_int")
    q = unpack_values(weight, out_features, in_features, scheme)
    scales = unpack_scales(weight, out_features, in_features, scheme)
    if has_zero_points(scheme):
        zeros = unpack_zero_points(weight, out_features, in_features, scheme).to(torch.int8)
        q = q - zeros.repeat_interleave(span, 1)[:, :in_features]
    w = torch.nn.functional.pad(q, (0, scales.shape[1] * span - in_features))
    return w.view(out_features, -1, span), scales


def fold_scales(w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Float group scales folded to INT8, as the kernels do for many tokens.

    Args:
        w: int8 ``(N, S, span)`` from :func:`unpack_groups`.
        scales: float32 ``(N, S)``.

    Returns:
        int8 ``(N, S · span)`` and float32 row scales ``(N,)``.
    """
    peak = w.abs().amax(-1).to(torch.float32) * scales.abs()
    row_scale = peak.amax(-1) / torch.full((), 127.0)
    ratio = torch.where(row_scale[:, None] > 0, scales / row_scale[:, None] * 256.0, 0.0)
    factor = torch.round(ratio.clamp(-32512.0, 32512.0)).to(torch.int32)
    folded = (w.to(torch.int32) * factor[..., None] + 128) >> 8
    return folded.to(torch.int8).flatten(1), row_scale


def _int8_panels(weight: Tensor, layout: PanelLayout) -> tuple[Tensor, ...]:
    """The panels of scheme ``i8`` that INT8 with group scales consists of, one a scale."""
    panels = weight[:, layout.values : layout.bytes]
    return tuple(panels.split(PANEL * 4 + layout.span * PANEL, 1))  # type: ignore[no-untyped-call]


def _float_section(weight: Tensor, start: int, layout: PanelLayout, out_features: int) -> Tensor:
    """A section of one float32 a row and scale, as ``(out_features, scales a row)``."""
    section = weight[:, start : start + layout.scale_groups * PANEL * 4].contiguous()
    rows = section.view(torch.float32).view(-1, layout.scale_groups, PANEL).permute(0, 2, 1)
    return rows.reshape(-1, layout.scale_groups)[:out_features].contiguous()


def _unpack_nibbles(weight: Tensor, start: int, columns: int, out_features: int) -> Tensor:
    """A section of 8 bytes a column as uint8 ``(out_features, columns)``."""
    pairs = weight[:, start : start + columns * 8].contiguous().view(-1, columns, PANEL // 2)
    rows = torch.cat((pairs & 15, pairs >> 4), 2)
    return rows.permute(0, 2, 1).reshape(-1, columns)[:out_features].contiguous()


def _lines(size: int) -> int:
    return math.ceil(size / 64) * 64
