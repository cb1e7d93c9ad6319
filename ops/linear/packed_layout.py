"""Python view of the packed weight panel that ``packed_panel.h`` specifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from torch_armllm.ops.linear.schemes import GROUP, PANEL, traits_of
from torch_armllm.ops.untraced import untraced


@dataclass(frozen=True)
class PanelLayout:
    """Byte offsets inside one panel of 16 output rows.

    Attributes:
        groups: number of groups of 32 columns.
        span: columns per float group scale; 0 for one scale per row.
        scale_groups: scales per row.
        scales, offsets, multipliers, signs, zero_points, values: start of each section that the scheme has;
            for INT8 with group scales, ``scales`` and ``values`` are the start of the groups' panels.
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


@cache
def panel_layout(scheme: str, in_features: int) -> PanelLayout:
    """Returns the panel layout of a weight with ``in_features`` columns.

    Raises:
        ValueError: if the scheme is unknown.
    """
    span = traits_of(scheme).span
    with untraced():  # a graph that is traced holds no layouts
        groups, *sections = torch.ops.armllm.panel_sections(scheme, in_features)
    return PanelLayout(groups, span, *sections)


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
        int8 ``(N, K)`` in `SchemeTraits.values`.
    """
    layout, traits = panel_layout(scheme, in_features), traits_of(scheme)
    panels = panel_count(out_features)
    if traits.is_int8 and layout.span:
        parts = [
            unpack_values(part, out_features, part.shape[1] // 512 * GROUP, "i8")
            for part in _int8_panels(weight, layout)
        ]
        return torch.cat(parts, 1)[:, :in_features].contiguous()
    values = weight[:, layout.values : layout.bytes].contiguous()
    if traits.is_int8:
        lines = values.view(torch.int8).view(panels, layout.groups * 8, PANEL, 4)
    elif traits.has_wide_values:
        joined = _wide_bits(values.view(panels, layout.groups, traits.bits, PANEL * 4), traits.bits)
        lines = joined.view(panels, -1, PANEL, 4) - traits.bias
    elif traits.bits == 3:
        lines = _three_bits(values.view(panels, layout.groups, 3, PANEL // 2, 8)) - traits.bias
    else:
        pairs = values.view(panels, layout.groups * 4, PANEL // 2, 8)
        lines = torch.cat((pairs & 15, (pairs >> 4) ^ 8), 2).to(torch.int8) - traits.bias
    rows = lines.permute(0, 2, 1, 3).reshape(panels * PANEL, layout.groups * GROUP)
    if traits.signed_multipliers:
        negative = _negative(weight, layout).repeat_interleave(GROUP, 1)
        rows = torch.where(negative, -1 - rows, rows)
    return rows[:out_features, :in_features].contiguous()


def unpack_multipliers(weight: Tensor, out_features: int, in_features: int, scheme: str = "g32i") -> Tensor:
    """Unpacks multipliers: ``(out_features, groups)``.

    They are uint8, or int8 if they have signs, in `SchemeTraits.multipliers`.
    """
    layout, traits = panel_layout(scheme, in_features), traits_of(scheme)
    if not traits.has_wide_values:
        sizes = _unpack_nibbles(weight, layout.multipliers, layout.groups, out_features) + 1
        if not traits.signed_multipliers:
            return sizes
        negative = _negative(weight, layout)[:out_features]
        return torch.where(negative, -sizes.to(torch.int8), sizes.to(torch.int8))
    count = (traits.largest_multiplier - 1).bit_length()
    section = weight[:, layout.multipliers : layout.multipliers + layout.groups * 2 * count].contiguous()
    planes = section.view(-1, layout.groups, count, 2, 1)
    bits = ((planes >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(3)  # (panels, G, planes, 16)
    sizes = (bits << torch.arange(count, dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8) + 1
    return sizes.permute(0, 2, 1).reshape(-1, layout.groups)[:out_features].contiguous()


def unpack_zero_points(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Unpacks zero points: uint8 ``(out_features, scales per row)`` in 0..15.

    Those of ``g32iz`` are ``(out_features, groups)`` in 6..9.
    """
    layout, traits = panel_layout(scheme, in_features), traits_of(scheme)
    if traits.has_narrow_zero_points:
        section = weight[:, layout.zero_points : layout.zero_points + layout.groups * 4].contiguous()
        bits = (section.view(-1, layout.groups, 4, 1) >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
        rows = bits.flatten(2).permute(0, 2, 1).reshape(-1, layout.groups)
        assert traits.zero_points is not None
        return rows[:out_features].contiguous() + traits.zero_points[0]
    return _unpack_nibbles(weight, layout.zero_points, layout.scale_groups, out_features)


def unpack_scales(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Unpacks scales: float32 ``(out_features,)``, or ``(out_features, scales per row)`` for float groups."""
    layout = panel_layout(scheme, in_features)
    if traits_of(scheme).is_int8 and layout.span:
        parts = [part[:, : PANEL * 4] for part in _int8_panels(weight, layout)]
        return _float_section(torch.cat(parts, 1), 0, layout, out_features)
    start = layout.scales if layout.span else 0
    dtype = torch.bfloat16 if traits_of(scheme).bf16_scales else torch.float32
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
    if traits_of(scheme).is_int8 and layout.span:
        parts = [part[:, : PANEL * 4] for part in _int8_panels(weight, layout)]
        found = [torch.cat(parts, 1).view(torch.float32)]
    else:
        dtype = torch.bfloat16 if traits_of(scheme).bf16_scales else torch.float32
        start = layout.scales if layout.span else 0
        found = [weight[:, start : start + size * dtype.itemsize].contiguous().view(dtype)]
    if traits_of(scheme).offsets:
        found.append(weight[:, layout.offsets : layout.offsets + size * 4].contiguous().view(torch.float32))
    return found


def largest_multiplier(weight: Tensor, in_features: int, scheme: str) -> int:
    """Returns the largest multiplier of a packed weight, uint8 ``(panels, panel_bytes)``, without its sign.

    Raises:
        ValueError: if the scheme's multipliers are not nibbles, as those of ``g32i``, ``g32iz`` and ``int3``.
    """
    if not traits_of(scheme).multipliers or traits_of(scheme).has_wide_values:
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
    traits = traits_of(scheme)
    if traits.span:
        raise ValueError(f"scheme {scheme!r} has float group scales and no integer form; use unpack_weight")
    w = unpack_values(weight, out_features, in_features, scheme)
    if traits.zero_points:
        zeros = unpack_zero_points(weight, out_features, in_features, scheme).to(torch.int8)
        w = w - (_spread(zeros, in_features) if traits.has_narrow_zero_points else zeros)
    if traits.multipliers:
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
    span = traits_of(scheme).span
    if not span:
        raise ValueError(f"scheme {scheme!r} has one scale per row; use unpack_int")
    q = unpack_values(weight, out_features, in_features, scheme)
    scales = unpack_scales(weight, out_features, in_features, scheme)
    if traits_of(scheme).zero_points:
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


def _wide_bits(lines: Tensor, bits: int) -> Tensor:
    """Joins the bits of wide values: uint8 ``(panels, G, bits, 64)`` to int8 ``(panels, G, 8, 64)``."""
    low = torch.stack((lines[:, :, :4] & 15, lines[:, :, :4] >> 4), 3).flatten(2, 3)
    shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8)[:, None]
    high = ((lines[:, :, 4:, None] >> shifts) & (1 << bits - 4) - 1).flatten(2, 3)
    return (low | high << 4).to(torch.int8)


def _three_bits(lines: Tensor) -> Tensor:
    """Joins the bits of ``int3``: uint8 ``(panels, G, 3, 8, 8)`` to int8 ``(panels, 4 · G, 16, 8)`` in 0..7.

    Groups with a negative multiplier store 3 - q.
    """
    nibbles = torch.cat((lines & 15, lines >> 4), 3)  # (panels, G, 3, 16, 8)
    low = torch.stack((nibbles[:, :, :2] & 3, nibbles[:, :, :2] >> 2), 3).flatten(2, 3)
    high = (nibbles[:, :, 2:] >> torch.arange(4, dtype=torch.uint8)[:, None, None]) & 1
    return (low | high << 2).flatten(1, 2).to(torch.int8)


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
