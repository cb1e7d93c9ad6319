"""Small integers that lie side by side in larger ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.quant.formats.weights import Integers
from torch_armllm.quant.scheme import Quantised

SPANS = (128, 64, 32)
"""Group sizes that a scheme has."""


def unpack(packed: Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """Unsigned integers of 4 or 8 ``bits`` from the int32 that hold them, the lowest bits first.

    Args:
        packed: int32 matrix.
        bits: of each integer.
        axis: along which neighbours were packed.
        order: where in the int32 the integers 0, 1, … lie; None for their own order.

    Returns:
        uint8, ``32 / bits`` times as long along ``axis``.
    """
    if packed.dtype not in (torch.int32, torch.uint32):
        raise ValueError(f"packed integers are int32, not {packed.dtype}")
    lanes = packed.view(torch.int32).movedim(axis, -1).contiguous().view(torch.uint8)
    if bits == 4:
        lanes = torch.stack([lanes & 15, lanes >> 4], dim=-1).flatten(-2)
    if order is not None:
        lanes = lanes.view(*lanes.shape[:-1], -1, len(order))[..., list(order)].flatten(-2)
    return lanes.movedim(-1, axis).contiguous()


def integers(
    q: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None = None
) -> Integers:
    """Integers of 4 bits with the scheme that holds them as they are.

    Args:
        q: int8 (N, K): −8…7, or 0…15 where there are zero points.
        scales: floats (N, S), one a group of ``group`` columns.
        zeros: (N, S) in 0…15, or None.
        group: columns that share a scale; K or more, or −1: the whole row.
        order: see `Integers`.

    Raises:
        ValueError: no scheme has groups of this size, or the shapes do not fit.
    """
    rows, columns = q.shape
    whole = group in (-1, 0) or group >= columns
    count = 1 if whole else -(-columns // group)
    for name, part in (("scales", scales), ("zero points", zeros)):
        if part is not None and part.shape != (rows, count):
            raise ValueError(f"{name} have the shape {tuple(part.shape)}, and {(rows, count)} is expected")
    suffix = "" if zeros is None else "z"
    if zeros is not None and (int(zeros.min()) < 0 or int(zeros.max()) > 15):
        reach = f"{int(zeros.min())} to {int(zeros.max())}"
        raise ValueError(f"zero points reach from {reach}, and 0…15 can be read")
    if whole:
        own = None if zeros is None else zeros[:, 0].to(torch.uint8).contiguous()
        return Integers(Quantised(f"row{suffix}", q, scales[:, 0].float().contiguous(), None, own), order)
    span = next((span for span in SPANS if group % span == 0), None)
    if span is None:
        raise ValueError(f"groups of {group} columns: multiples of {min(SPANS)} can be read")
    scales = _repeated(scales, group // span, columns, span)
    zeros = None if zeros is None else _repeated(zeros, group // span, columns, span).to(torch.uint8)
    if scales.dtype == torch.bfloat16:
        suffix += "b"
    else:
        scales = scales.float()
    return Integers(Quantised(f"g{span}{suffix}", q, scales, None, zeros), order)


def _repeated(values: Tensor, times: int, columns: int, span: int) -> Tensor:
    """One value for each ``span`` columns where there was one for so many ``times`` as many."""
    return values.repeat_interleave(times, dim=1)[:, : -(-columns // span)].contiguous()
