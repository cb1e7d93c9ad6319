"""Random packed weights for tests of linear layers, and comparison of results."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops import linear


def packed(rows: int, columns: int, scheme: str) -> Tensor:
    """Returns a random packed weight."""
    span, zero_points = linear.group_span(scheme), linear.has_zero_points(scheme)
    if scheme == "i8":
        return linear.pack_int8(
            torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows) / 50
        )
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8) + (8 if zero_points else 0)
    if scheme == "int6":
        q = torch.randint(-32, 32, (rows, columns), dtype=torch.int8)
        multipliers = torch.randint(1, 5, (rows, -(-columns // 32)), dtype=torch.uint8)
        return linear.pack_int4(q, multipliers, torch.rand(rows) / 30, scheme)
    if scheme == "int3":
        q = torch.randint(-4, 4, (rows, columns), dtype=torch.int8)
        return linear.pack_int4(q, signed_multipliers(rows, -(-columns // 32)), torch.rand(rows) / 15, scheme)
    if scheme == "g32iz":
        shape = (rows, -(-columns // 32))
        multipliers, zeros = (
            torch.randint(low, high, shape, dtype=torch.uint8) for low, high in ((1, 15), (6, 10))
        )
        q = torch.randint(0, 16, (rows, columns), dtype=torch.int8)
        return linear.pack_int4(q, multipliers, torch.rand(rows) / 26, scheme, zeros)
    if scheme == "g32i":
        multipliers = torch.randint(1, 17, (rows, -(-columns // 32)), dtype=torch.uint8)
        return linear.pack_int4(q, multipliers, torch.rand(rows) / 30, scheme)
    shape = (rows, -(-columns // span)) if span else (rows,)
    scales = torch.rand(shape) / 5
    offsets = torch.randn(shape) if linear.has_offsets(scheme) else None
    if linear.is_int8(scheme):
        q = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        return linear.pack_int4(q, None, scales / 16, scheme, None, offsets)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if zero_points else None
    return linear.pack_int4(
        q, None, scales.bfloat16() if linear.has_bf16_scales(scheme) else scales, scheme, zeros, offsets
    )


def signed_multipliers(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns random multipliers of scheme ``int3``: int8 in -16..-1 and 1..16."""
    sizes = torch.randint(0, 32, shape, generator=generator, dtype=torch.int8) - 16
    return sizes + (sizes >= 0).to(torch.int8)


def quant_linear(x: Tensor, weight: Tensor, rows: int, scheme: str, *more: Tensor | None) -> Tensor:
    """Calls the linear op of a scheme; ``more`` are its bias and residual."""
    if scheme == "i8":
        return linear.int8_linear(x, weight, rows, *more)
    return linear.int4_linear(x, weight, rows, scheme, *more)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if the bits are equal; any NaN equals any NaN."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    nans = torch.equal(a.isnan(), b.isnan())
    return a.dtype == b.dtype and nans and torch.equal(a.nan_to_num(0).view(kind), b.nan_to_num(0).view(kind))


def error(a: Tensor, b: Tensor) -> float:
    """Returns the norm of the difference, relative to the norm of ``b``."""
    return float((a.float() - b.float()).norm() / (b.float().norm() + 1e-20))
