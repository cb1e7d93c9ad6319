"""Unpacking of 4-bit and 8-bit integers, and the choice of a scheme that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.quant.packing import in_scale_range
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.registry import scheme_named

GROUP_SIZES = (128, 64, 32)
"""Group sizes of our schemes, the largest first."""
INT8_SCHEME = "int8g32"
"""The scheme to which 4-bit weights are rounded with a small error."""


def unpack(packed: Tensor, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpacks unsigned integers of 4 or 8 ``bits`` from int32 words, the lowest bits first.

    Args:
        packed: int32 matrix.
        bits: width of each integer.
        axis: the axis along which neighbors were packed; axis 0 is faster.
        order: positions of the integers 0, 1, … in a word; None: 0, 1, ….

    Returns:
        uint8, ``32 / bits`` times as long along ``axis``.
    """
    if packed.dtype not in (torch.int32, torch.uint32):
        raise ValueError(f"packed integers are int32, not {packed.dtype}")
    words, count = packed.view(torch.int32), 32 // bits
    unpacked = torch.empty((*words.shape[: axis + 1], count, *words.shape[axis + 1 :]), dtype=torch.uint8)
    for lane, position in enumerate(order or range(count)):
        unpacked.select(axis + 1, lane).copy_((words >> (bits * position)).bitwise_and_((1 << bits) - 1))
    return unpacked.flatten(axis, axis + 1)


def centered(values: Tensor, bits: int) -> Tensor:
    """Shifts unsigned integers (uint8) by half their range, to int8 around 0."""
    return (values.contiguous() - (1 << (bits - 1))).view(torch.int8)


def group_permutation(groups: Tensor, columns: int, group: int) -> Tensor | None:
    """Returns the act-order permutation (``desc_act``) that sorts columns by group; None if they are sorted.

    Args:
        groups: integers (K,), the group of each column.
        columns: K.
        group: columns per group.

    Raises:
        ValueError: a group has more or fewer than ``group`` columns.
    """
    expected = torch.arange(columns) // (columns if group <= 0 else group)
    groups = groups.long()
    if torch.equal(groups, expected):
        return None
    permutation = torch.argsort(groups, stable=True)
    if groups.shape != expected.shape or not torch.equal(groups[permutation], expected):
        raise ValueError(f"g_idx does not give every group {group} columns")
    return permutation


def integer_weight(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    requantizer: Requantizer,
    permutation: Tensor | None = None,
    bits: int = 4,
) -> IntegerWeight:
    """Wraps integers in the scheme that holds them exactly: ``w = scale · (q − zero)``.

    Groups of another size than a multiple of 32 are rounded to INT8 in groups of 32.

    Args:
        q: int8 (N, K): −8…7, or −128…127 of 8 bits.
        scales: floats (N, S), one per group of ``group`` columns.
        zeros: zero points int16 (N, S) in the range of q; None if all are 0.
        group: columns that share a scale; K or more, or −1: the whole row.
        requantizer: rounds weights that no scheme holds.
        permutation: see `IntegerWeight`.
        bits: 4 or 8.

    Raises:
        ValueError: a scale is not finite or above 2^100, or the shapes do not fit.
    """
    rows, columns = q.shape
    whole_row = group <= 0 or group >= columns
    count = 1 if whole_row else -(-columns // group)
    for name, part in (("scales", scales), ("zero points", zeros)):
        if part is not None and part.shape != (rows, count):
            raise ValueError(f"{name} have the shape {tuple(part.shape)}, and {(rows, count)} is expected")
    if not in_scale_range(scales):
        raise ValueError("a scale is NaN, infinite or above 2^100: the checkpoint is damaged")
    span = 0 if whole_row else next((span for span in GROUP_SIZES if group % span == 0), None)
    if span is None:
        value = q.float() if zeros is None else q.float() - _repeated(zeros, group, columns, 1)
        value *= _repeated(scales.float(), group, columns, 1)
        return IntegerWeight(
            requantizer.requantize(value, INT8_SCHEME, f"groups of {group}").quantized, permutation
        )
    if span:
        scales = _repeated(scales, group // span, columns, span)
        zeros = None if zeros is None else _repeated(zeros, group // span, columns, span)
    if bits == 8:
        return IntegerWeight(_int8(q, scales, zeros, span), permutation)
    return IntegerWeight(_int4(q, scales, zeros, span), permutation)


def with_offsets(weight: IntegerWeight, offsets: Tensor) -> IntegerWeight:
    """Adds an offset to each group of 4-bit integers: ``w = scale · q + offset``.

    Raises:
        ValueError: a whole row has one scale, or groups have another size than a multiple of 32.
    """
    quantized = weight.quantized
    span = scheme_named(quantized.scheme).span
    if not span or quantized.scheme == INT8_SCHEME:
        raise ValueError(
            f"{offsets.shape[1]} groups in {quantized.q.shape[1]} columns have offsets: only groups of "
            f"multiples of {min(GROUP_SIZES)} can have them"
        )
    times = -(-quantized.scales.shape[1] // offsets.shape[1])
    added = _repeated(offsets, times, quantized.q.shape[1], span).float()
    scales = quantized.scales.float()
    return IntegerWeight(Quantized(f"g{span}m", quantized.q, scales, offsets=added), weight.permutation)


def _int4(q: Tensor, scales: Tensor, zeros: Tensor | None, span: int) -> Quantized:
    if bool(((q + 8).view(torch.uint8) > 15).any()):
        raise ValueError(f"integers reach from {int(q.min())} to {int(q.max())}, and 4 bits hold −8…7")
    name = f"g{span}" if span else "row"
    if zeros is not None:
        name, q, zeros = f"{name}z", q + 8, zeros + 8
        if int(zeros.min()) < 0 or int(zeros.max()) > 15:
            raise ValueError("a zero point lies outside of the range of its integers")
        zeros = (zeros if span else zeros[:, 0]).to(torch.uint8).contiguous()
    if not span:
        return Quantized(name, q.contiguous(), scales[:, 0].float().contiguous(), None, zeros)
    if scales.dtype == torch.bfloat16:
        return Quantized(f"{name}b", q.contiguous(), scales.contiguous(), None, zeros)
    return Quantized(name, q.contiguous(), scales.float().contiguous(), None, zeros)


def _int8(q: Tensor, scales: Tensor, zeros: Tensor | None, span: int) -> Quantized:
    if not span and zeros is None:
        return Quantized("int8", q.contiguous(), scales[:, 0].float().contiguous())
    if not span:  # each group gets the row's scale and zero point
        span, columns = GROUP_SIZES[0], q.shape[1]
        groups = -(-columns // span)
        scales, zeros = (part.expand(-1, groups) for part in (scales, zeros) if part is not None)
    scales = scales.float().contiguous()
    if zeros is None:
        return Quantized(f"int8g{span}", q.contiguous(), scales)
    return Quantized(f"int8g{span}m", q.contiguous(), scales, offsets=-(scales * zeros))


def _repeated(values: Tensor, times: int, columns: int, span: int) -> Tensor:
    """Repeats each value ``times``, to one per ``span`` columns."""
    return values.repeat_interleave(times, dim=1)[:, : -(-columns // span)].contiguous()
