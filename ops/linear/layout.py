"""The packed weight panel seen from Python; ``linear.h`` describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 16
GROUP = 32
SCHEMES = ("g32i", "row", "g32", "i8")


@dataclass(frozen=True)
class PanelLayout:
    """Byte offsets inside one panel of 16 output rows."""

    groups: int
    multipliers: int
    values: int
    bytes: int


def panel_layout(scheme: str, in_features: int) -> PanelLayout:
    """Describes the panels of a weight with ``in_features`` columns.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}; there are: {', '.join(SCHEMES)}")
    groups = -(-in_features // GROUP)
    values = 64
    if scheme == "g32i":
        values = 64 + -(-groups * 8 // 64) * 64
    elif scheme == "g32":
        values = groups * 64
    return PanelLayout(groups, 64, values, values + groups * (512 if scheme == "i8" else 256))


def panel_count(out_features: int) -> int:
    """Panels that ``out_features`` rows take."""
    return -(-out_features // PANEL)


def unpack_values(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The quantised values q of a packed weight, before any scale or multiplier.

    Args:
        weight: uint8 ``(panels, panel_bytes)``.
        out_features: rows N of the weight.
        in_features: columns K of the weight.
        scheme: the one it was packed with.

    Returns:
        int8 ``(N, K)``.
    """
    layout = panel_layout(scheme, in_features)
    panels = panel_count(out_features)
    values = weight[:, layout.values : layout.bytes].contiguous()
    if scheme == "i8":
        lines = values.view(torch.int8).view(panels, layout.groups * 8, PANEL, 4)
    else:
        pairs = values.view(panels, layout.groups * 4, 1, PANEL, 4)
        lines = torch.cat((pairs & 15, pairs >> 4), 2).to(torch.int8).view(panels, -1, PANEL, 4) - 8
    rows = lines.permute(0, 2, 1, 3).reshape(panels * PANEL, layout.groups * GROUP)
    return rows[:out_features, :in_features].contiguous()


def unpack_multipliers(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    """The multipliers of scheme g32i: uint8 ``(out_features, groups)`` in 1..16."""
    layout = panel_layout("g32i", in_features)
    pairs = weight[:, layout.multipliers : layout.multipliers + layout.groups * 8].contiguous()
    pairs = pairs.view(-1, layout.groups, 8, 1)
    rows = torch.cat((pairs & 15, pairs >> 4), 3).view(-1, layout.groups, PANEL) + 1
    return rows.permute(0, 2, 1).reshape(-1, layout.groups)[:out_features].contiguous()


def unpack_scales(weight: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The scales: float32 ``(out_features,)``, or ``(out_features, groups)`` for scheme g32."""
    layout = panel_layout(scheme, in_features)
    columns = layout.groups if scheme == "g32" else 1
    scales = weight[:, : columns * 64].contiguous().view(torch.float32).view(-1, columns, PANEL)
    rows = scales.permute(0, 2, 1).reshape(-1, columns)[:out_features].contiguous()
    return rows if scheme == "g32" else rows[:, 0].contiguous()


def unpack_int(weight: Tensor, out_features: int, in_features: int, scheme: str) -> tuple[Tensor, Tensor]:
    """A packed weight of an exact scheme (g32i, row, i8) as integers and one scale a row.

    Returns:
        ``w`` int8 ``(out_features, in_features)`` and ``row_scale`` float32 ``(out_features,)``: the weight
        is their product.

    Raises:
        ValueError: scheme g32, whose scales are floats a group.
    """
    if scheme == "g32":
        raise ValueError("scheme 'g32' has float group scales and no integer form; use unpack_weight")
    w = unpack_values(weight, out_features, in_features, scheme)
    if scheme == "g32i":
        multipliers = unpack_multipliers(weight, out_features, in_features)
        w = w * multipliers.to(torch.int8).repeat_interleave(GROUP, 1)[:, :in_features]
    return w, unpack_scales(weight, out_features, in_features, scheme)
