"""Packs float weights into the panels that the kernels read, a few rows at a time, and unpacks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_armllm.ops import linear
from torch_armllm.ops.linear import PANEL
from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import (
    Quantized,
    Rounding,
    Scheme,
    Search,
    op_name,
    relative_error,
    row_chunks,
)
from torch_armllm.system.allocator import release_free_memory

_PIECE = 1 << 24
"""Weights per piece: enough chunks for many cores, and a small part of a large head."""
_SCALE_LIMIT = 2.0**100
"""A weight is at most 2^14 scales, so that those of smaller scales are finite float32 numbers."""


def pack(quantized: Quantized) -> Tensor:
    """Packs integers of N rows into panels: uint8 (⌈N/16⌉, bytes)."""
    if quantized.scheme == "int8":
        return linear.pack_int8(quantized.q, quantized.scales)
    return linear.pack_int4(
        quantized.q,
        quantized.multipliers,
        quantized.scales,
        quantized.scheme,
        quantized.zeros,
        quantized.offsets,
    )


def quantize_matrices(
    weights: Sequence[Tensor],
    scheme: Scheme,
    roundings: Sequence[Rounding] | None = None,
    rotated: bool = False,
) -> tuple[Tensor, float]:
    """Quantizes and packs E float matrices of the same shape (N, K), such as views of one large parameter.

    Args:
        weights: the matrices.
        scheme: the scheme.
        roundings: one per matrix; None: scales are searched.
        rotated: rotate the rows first: see `torch_armllm.ops.linear.rotate_groups`.

    Returns:
        The panels, uint8 (E, ⌈N/16⌉, bytes), and the relative round-trip error of all of them together.
    """
    packed, error, energy = _quantize(weights, scheme, roundings or [Search()] * len(weights), rotated)
    return packed, relative_error(error, energy)


def quantize_pieces(
    weight: Tensor,
    scheme: Scheme,
    rounding: Rounding,
    take: Callable[[Tensor, Tensor], None],
    rotated: bool = False,
) -> float:
    """Quantizes and packs a float matrix (N, K) piece by piece, for matrices too large to hold twice.

    Args:
        weight: the matrix.
        scheme: the scheme.
        rounding: chooses the integers.
        take: called with some rows and their panels, uint8 (⌈rows/16⌉, bytes), in order.
        rotated: rotate the rows first: see `torch_armllm.ops.linear.rotate_groups`.

    Returns:
        The relative round-trip error ‖W − Ŵ‖ / ‖W‖.
    """
    sums = (0.0, 0.0)
    for rows in row_chunks(weight.shape[0], weight.shape[1], _PIECE):
        piece = linear.rotate_groups(weight[rows]) if rotated else weight[rows]
        packed, error, energy = _quantize([piece], scheme, [rounding])
        take(piece, packed[0])
        del packed, piece
        release_free_memory()  # freed pieces would add up otherwise
        sums = (sums[0] + error, sums[1] + energy)
    return relative_error(*sums)


def empty_panels(leading: tuple[int, ...], rows: int, columns: int, scheme: str, repeat: int = 1) -> Tensor:
    """Panels on the meta device of matrices (N, K): uint8 (*leading, repeat · ⌈N/16⌉, bytes)."""
    shape = (
        *leading,
        repeat * linear.panel_count(rows),
        linear.panel_layout(op_name(scheme), columns).bytes,
    )
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def dequantize_matrix(packed: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """Returns the float32 matrix (N, K) of the panels, or (E, N, K) of packed experts."""
    return linear.unpack_weight(packed, out_features, in_features, op_name(scheme))


def in_scale_range(scales: Tensor) -> bool:
    """True if all scales or offsets, floats, are below 2^100 in size, so that they make finite weights."""
    if not scales.numel():
        return True
    low, high = torch.aminmax(scales)  # one pass, and NaN if any is
    return bool((low > -_SCALE_LIMIT) & (high < _SCALE_LIMIT))  # false for NaN


def panel_fault(panels: Tensor, columns: int, scheme: str) -> str | None:
    """Returns what is wrong with panels, uint8 (P, bytes), that no packing wrote; None if nothing is.

    It reads scales, offsets and multipliers, a small part of the panels.  All values of the rest are valid.
    """
    name = op_name(scheme)
    largest = linear.traits_of(name).largest_multiplier
    for part in panels.split(max(1, _PIECE // panels.shape[1])):
        if not all(in_scale_range(scales) for scales in linear.scale_sections(part, columns, name)):
            return f"a scale that is NaN, infinite or above 2^100, and smaller scales of scheme {scheme}"
        if largest & (largest - 1):  # fewer than its bits can tell apart: products of others overflow INT8
            found = linear.largest_multiplier(part, columns, name)
            if found > largest:
                return f"a multiplier of {found}, and multipliers of scheme {scheme} from 1 to {largest}"
    return None


def split_panels(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Splits alternating panels (…, 2·P, bytes) into gate and up panels (…, P, bytes)."""
    return gate_up[..., 0::2, :].contiguous(), gate_up[..., 1::2, :].contiguous()


def _quantize(
    weights: Sequence[Tensor], scheme: Scheme, roundings: Sequence[Rounding], rotated: bool = False
) -> tuple[Tensor, float, float]:
    """Returns the panels of E float matrices, rotated or not, Σ(W − Ŵ)² and ΣW²."""
    size, columns = weights[0].shape
    jobs = [
        (index, part)
        for index, rounding in enumerate(roundings)
        for part in row_chunks(size, columns, rounding.chunk)
    ]
    assert len(roundings) == len(weights)
    packed = torch.empty_like(empty_panels((len(weights),), size, columns, scheme.name), device="cpu")

    def work(job: tuple[int, slice]) -> tuple[float, float]:
        index, part = job
        rows = linear.rotate_groups(weights[index][part]) if rotated else weights[index][part]
        quantized, error, energy = scheme.quantize_chunk(rows, roundings[index])
        panels = slice(part.start // PANEL, linear.panel_count(part.stop))
        packed[index, panels] = pack(quantized)
        return error, energy

    sums = each(work, jobs)
    return packed, sum(s[0] for s in sums), sum(s[1] for s in sums)
