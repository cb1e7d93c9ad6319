"""Python view of the packed weight panel that ``packed_panel.h`` specifies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops.tables import ENUMS

PANEL = 16
GROUP = 32
SCHEMES = ENUMS["Scheme"]
"""Every scheme and its number among the kernels."""
EXACT = ("g32i", "g32iz", "row", "rowz", "i8", "int6", "int3")
"""Schemes with integer sums over all of K: the same bits in every variant and batch."""


@dataclass(frozen=True)
class PanelLayout:
    """Byte offsets inside one panel of 16 output rows.

    Attributes:
        groups: number of groups of 32 columns.
        span: columns per float group scale; 0 for one scale per row.
        scale_groups: scales per row.
        scales, offsets, multipliers, signs, zero_points, values: start of each section, set even if the
            scheme lacks it; for INT8 with group scales, ``scales`` and ``values`` are the start of the
            groups' panels.
        bytes: size of the panel.
    """

    groups: int
    span: int
    scale_groups: int
    scales: int
    offsets: int
    multipliers: int
    signs: int
    zero_points: int
    values: int
    bytes: int


def group_span(scheme: str) -> int:
    """Returns the columns per float scale: 32, 64 or 128, or 0 for schemes with one scale per row.

    Raises:
        ValueError: if the scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}; choose from: {', '.join(SCHEMES)}")
    return 0 if scheme in EXACT else int(scheme.removeprefix("int8")[1:].rstrip("zbm"))


def same_in_any_batch(scheme: str) -> bool:
    """True if a row's bits do not depend on the number of rows: few and many rows add alike."""
    return scheme in EXACT or scheme.startswith("int8")


def has_zero_points(scheme: str) -> bool:
    """True if values are 0..15 minus a zero point."""
    return SCHEMES[scheme] & 8 != 0


def has_bf16_scales(scheme: str) -> bool:
    """True if the group scales are bfloat16."""
    return SCHEMES[scheme] & 16 != 0


def has_offsets(scheme: str) -> bool:
    """True if each group has a float offset: ``scale · q + offset``."""
    return SCHEMES[scheme] & 32 != 0


def is_int8(scheme: str) -> bool:
    """True if the values are INT8."""
    return scheme == "i8" or scheme.startswith("int8")


def has_multipliers(scheme: str) -> bool:
    """True if each group of 32 columns has an integer multiplier."""
    return scheme in ("g32i", "g32iz", "int6", "int3")


def has_narrow_zero_points(scheme: str) -> bool:
    """True if each group of 32 columns has a zero point of two bits, 6..9."""
    return scheme == "g32iz"


def panel_layout(scheme: str, in_features: int) -> PanelLayout:
    """Returns the panel layout of a weight with ``in_features`` columns.

    Raises:
        ValueError: if the scheme is unknown.
    """
    span = group_span(scheme)
    groups = -(-in_features // GROUP)
    scale_groups = -(-groups * GROUP // span) if span else 1
    if is_int8(scheme) and span:
        start = scale_groups * PANEL * 4 if has_offsets(scheme) else 0
        total = start + scale_groups * PANEL * 4 + groups * 512
        return PanelLayout(groups, span, scale_groups, start, 0, start, start, start, start, total)
    sections = offsets = at = PANEL * 4
    if span:
        at = sections = offsets = at + _lines(scale_groups * PANEL * (2 if has_bf16_scales(scheme) else 4))
    if has_offsets(scheme):
        at = sections = at + scale_groups * PANEL * 4
    if has_multipliers(scheme):
        at += _lines(groups * (4 if scheme == "int6" else 8))
    signs = at if scheme == "int3" else sections
    if scheme == "int3":
        at += _lines(groups * 2)
    zero_points = at
    if has_narrow_zero_points(scheme):
        zero_points = sections + groups * 8
        at = sections + _lines(groups * 12)
    elif has_zero_points(scheme):
        at += _lines(scale_groups * 8)
    total = at + groups * {"i8": 512, "int6": 384, "int3": 192}.get(scheme, 256)
    return PanelLayout(
        groups, span, scale_groups, PANEL * 4, offsets, sections, signs, zero_points, at, total
    )


def panel_count(out_features: int) -> int:
    """Returns the number of panels for ``out_features`` rows."""
    return -(-out_features // PANEL)


def unpack_values(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Unpacks the quantized values q, before any zero point, scale or multiplier.

    Args:
        weight: uint8 ``(panels, panel_bytes)``.
        out_features: N.
        in_features: K.
        scheme: the scheme of the packed weight.

    Returns:
        int8 ``(N, K)``: 0..15 for schemes with zero points, -128..127 for INT8, -32..31 for ``int6``,
        -4..3 for ``int3``, otherwise -8..7.
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
    elif scheme == "int6":
        lines = _six_bits(values.view(panels, layout.groups, 6, PANEL * 4)).view(panels, -1, PANEL, 4)
    elif scheme == "int3":
        lines = _three_bits(values.view(panels, layout.groups, 3, PANEL // 2, 8))
    else:
        pairs = values.view(panels, layout.groups * 4, PANEL // 2, 8)
        lines = torch.cat((pairs & 15, (pairs >> 4) ^ 8), 2).to(torch.int8)
        if not has_zero_points(scheme):
            lines = lines - 8
    rows = lines.permute(0, 2, 1, 3).reshape(panels * PANEL, layout.groups * GROUP)
    if scheme == "int3":
        negative = _negative(weight, layout).repeat_interleave(GROUP, 1)
        rows = torch.where(negative, -1 - rows, rows)
    return rows[:out_features, :in_features].contiguous()


def unpack_multipliers(weight: Tensor, out_features: int, in_features: int, scheme: str = "g32i") -> Tensor:
    """Unpacks multipliers: ``(out_features, groups)``.

    They are uint8 in 1..16 for ``g32i``, in 1..14 for ``g32iz`` and in 1..4 for ``int6``, and int8 in
    -16..-1 or 1..16 for ``int3``.
    """
    layout = panel_layout(scheme, in_features)
    if scheme != "int6":
        sizes = _unpack_nibbles(weight, layout.multipliers, layout.groups, out_features) + 1
        if scheme != "int3":
            return sizes
        negative = _negative(weight, layout)[:out_features]
        return torch.where(negative, -sizes.to(torch.int8), sizes.to(torch.int8))
    section = weight[:, layout.multipliers : layout.multipliers + layout.groups * 4].contiguous()
    planes = section.view(-1, layout.groups, 2, 2, 1)
    bits = ((planes >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(3)  # (panels, G, 2, 16)
    rows = (bits[:, :, 0] + 2 * bits[:, :, 1]).permute(0, 2, 1).reshape(-1, layout.groups)
    return rows[:out_features].contiguous() + 1


def unpack_zero_points(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Unpacks zero points: uint8 ``(out_features, scales per row)`` in 0..15.

    Those of ``g32iz`` are ``(out_features, groups)`` in 6..9.
    """
    layout = panel_layout(scheme, in_features)
    if has_narrow_zero_points(scheme):
        section = weight[:, layout.zero_points : layout.zero_points + layout.groups * 4].contiguous()
        bits = (section.view(-1, layout.groups, 4, 1) >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
        rows = bits.flatten(2).permute(0, 2, 1).reshape(-1, layout.groups)
        return rows[:out_features].contiguous() + 6
    return _unpack_nibbles(weight, layout.zero_points, layout.scale_groups, out_features)


def unpack_scales(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Unpacks scales: float32 ``(out_features,)``, or ``(out_features, scales per row)`` for float groups."""
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
    """Unpacks offsets: float32 ``(out_features, scales per row)``."""
    layout = panel_layout(scheme, in_features)
    return _float_section(weight, layout.offsets, layout, out_features)


def scale_sections(weight: Tensor, in_features: int, scheme: str) -> list[Tensor]:
    """Returns all scales and offsets of a packed weight, in the order of the panels.

    Args:
        weight: uint8 ``(panels, panel_bytes)``.
        in_features: K.
        scheme: the scheme of the packed weight.

    Returns:
        Copies of the sections of scales, bfloat16 or float32, and of offsets, float32.
    """
    layout = panel_layout(scheme, in_features)
    size = layout.scale_groups * PANEL
    if is_int8(scheme) and layout.span:
        parts = [part[:, : PANEL * 4] for part in _int8_panels(weight, layout)]
        found = [torch.cat(parts, 1).view(torch.float32)]
    else:
        dtype = torch.bfloat16 if has_bf16_scales(scheme) else torch.float32
        start = layout.scales if layout.span else 0
        found = [weight[:, start : start + size * dtype.itemsize].contiguous().view(dtype)]
    if has_offsets(scheme):
        found.append(weight[:, layout.offsets : layout.offsets + size * 4].contiguous().view(torch.float32))
    return found


def largest_multiplier(weight: Tensor, in_features: int, scheme: str) -> int:
    """Returns the largest multiplier of a packed weight, uint8 ``(panels, panel_bytes)``, without its sign.

    Raises:
        ValueError: if the scheme's multipliers are not nibbles, as those of ``g32i``, ``g32iz`` and ``int3``.
    """
    if not has_multipliers(scheme) or scheme == "int6":
        raise ValueError(f"multipliers of scheme {scheme!r} are not nibbles")
    layout = panel_layout(scheme, in_features)
    pairs = weight[:, layout.multipliers : layout.multipliers + layout.groups * 8]
    return 1 + max(int((pairs & 15).max()), int(pairs.max()) >> 4) if pairs.numel() else 0


def unpack_int(weight: Tensor, out_features: int, in_features: int, scheme: str) -> tuple[Tensor, Tensor]:
    """Unpacks a weight of an exact scheme (one of `EXACT`) to integers and one scale per row.

    Returns:
        ``w`` int8 ``(out_features, in_features)`` and ``row_scale`` float32 ``(out_features,)``: the weight
        is their product.

    Raises:
        ValueError: if the scheme has float group scales.
    """
    if group_span(scheme):
        raise ValueError(f"scheme {scheme!r} has float group scales and no integer form; use unpack_weight")
    w = unpack_values(weight, out_features, in_features, scheme)
    if has_zero_points(scheme):
        zeros = unpack_zero_points(weight, out_features, in_features, scheme).to(torch.int8)
        w = w - (_spread(zeros, in_features) if has_narrow_zero_points(scheme) else zeros)
    if has_multipliers(scheme):
        multipliers = unpack_multipliers(weight, out_features, in_features, scheme)
        w = w * _spread(multipliers.to(torch.int8), in_features)
    return w, unpack_scales(weight, out_features, in_features, scheme)


def unpack_groups(weight: Tensor, out_features: int, in_features: int, scheme: str) -> tuple[Tensor, Tensor]:
    """Unpacks a weight with float group scales to integers and scales.

    Returns:
        ``w`` int8 ``(out_features, S, span)``, q minus its zero point, padded with zeros, and ``scales``
        float32 ``(out_features, S)``.

    Raises:
        ValueError: if the scheme has no float group scales.
    """
    span = group_span(scheme)
    if not span:
        raise ValueError(f"scheme {scheme!r} has one scale per row; use unpack_int")
    q = unpack_values(weight, out_features, in_features, scheme)
    scales = unpack_scales(weight, out_features, in_features, scheme)
    if has_zero_points(scheme):
        zeros = unpack_zero_points(weight, out_features, in_features, scheme).to(torch.int8)
        q = q - zeros.repeat_interleave(span, 1)[:, :in_features]
    w = torch.nn.functional.pad(q, (0, scales.shape[1] * span - in_features))
    return w.view(out_features, -1, span), scales


def fold_scales(w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Folds float group scales into INT8 weights, as gemm does for many tokens.

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
    """Splits INT8 with group scales into its ``i8`` panels, one per scale."""
    panels = weight[:, layout.values : layout.bytes]
    return tuple(panels.split(PANEL * 4 + layout.span * PANEL, 1))  # type: ignore[no-untyped-call]


def _six_bits(lines: Tensor) -> Tensor:
    """Joins the bits of ``int6``: uint8 ``(panels, G, 6, 64)`` to int8 ``(panels, G, 8, 64)`` in -32..31."""
    low = torch.stack((lines[:, :, :4] & 15, lines[:, :, :4] >> 4), 3).flatten(2, 3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((lines[:, :, 4:, None] >> shifts) & 3).flatten(2, 3)
    return (low | high << 4).to(torch.int8) - 32


def _three_bits(lines: Tensor) -> Tensor:
    """Joins the bits of ``int3``: uint8 ``(panels, G, 3, 8, 8)`` to int8 ``(panels, 4 · G, 16, 8)`` in -4..3.

    Groups with a negative multiplier store -1 - q.
    """
    nibbles = torch.cat((lines & 15, lines >> 4), 3)  # (panels, G, 3, 16, 8)
    low = torch.stack((nibbles[:, :, :2] & 3, nibbles[:, :, :2] >> 2), 3).flatten(2, 3)
    high = (nibbles[:, :, 2:] >> torch.arange(4, dtype=torch.uint8)[:, None, None]) & 1
    return (low | high << 2).flatten(1, 2).to(torch.int8) - 4


def _negative(weight: Tensor, layout: PanelLayout) -> Tensor:
    """Returns which multipliers of ``int3`` are negative: bool ``(16 · panels, groups)``."""
    section = weight[:, layout.signs : layout.signs + layout.groups * 2].contiguous()
    bits = (section.view(-1, layout.groups, 2, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(2).permute(0, 2, 1).reshape(-1, layout.groups) == 1


def _spread(groups: Tensor, in_features: int) -> Tensor:
    """Repeats a value per group for its columns: ``(N, G)`` to ``(N, in_features)``."""
    return groups.repeat_interleave(GROUP, 1)[:, :in_features]


def _float_section(weight: Tensor, start: int, layout: PanelLayout, out_features: int) -> Tensor:
    """Reads a section of one float32 per row and scale, as ``(out_features, scales per row)``."""
    section = weight[:, start : start + layout.scale_groups * PANEL * 4].contiguous()
    rows = section.view(torch.float32).view(-1, layout.scale_groups, PANEL).permute(0, 2, 1)
    return rows.reshape(-1, layout.scale_groups)[:out_features].contiguous()


def _unpack_nibbles(weight: Tensor, start: int, columns: int, out_features: int) -> Tensor:
    """Reads a section of 8 bytes per column, as uint8 ``(out_features, columns)``."""
    pairs = weight[:, start : start + columns * 8].contiguous().view(-1, columns, PANEL // 2)
    rows = torch.cat((pairs & 15, pairs >> 4), 2)
    return rows.permute(0, 2, 1).reshape(-1, columns)[:out_features].contiguous()


def _lines(size: int) -> int:
    return math.ceil(size / 64) * 64
