"""Random packed weights for tests of linear layers, and comparison of results."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops import linear


def packed(rows: int, columns: int, scheme: str) -> Tensor:
    """Returns a random packed weight."""
    traits = linear.traits_of(scheme)
    q = random_integers(traits.values, (rows, columns))
    shape = (rows, -(-columns // traits.span)) if traits.span else (rows,)
    scales = torch.rand(shape) / (80 if traits.is_int8 else 30 if traits.multipliers else 5)
    if scheme == "i8":
        return linear.pack_int8(q, scales)
    groups = (rows, -(-columns // 32))
    multipliers = random_multipliers(scheme, *groups)
    zeros = None
    if traits.zero_points:
        zeros = random_integers(traits.zero_points, groups if traits.multipliers else shape, torch.uint8)
    offsets = torch.randn(shape) if traits.offsets else None
    return linear.pack_int4(
        q, multipliers, scales.bfloat16() if traits.bf16_scales else scales, scheme, zeros, offsets
    )


def random_integers(
    bounds: tuple[int, int],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.int8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns random integers from the least to the largest of ``bounds``."""
    return torch.randint(bounds[0], bounds[1] + 1, shape, generator=generator, dtype=dtype)


def random_multipliers(scheme: str, *shape: int, generator: torch.Generator | None = None) -> Tensor | None:
    """Returns random multipliers of a scheme; None if it has none."""
    traits = linear.traits_of(scheme)
    if traits.multipliers is None:
        return None
    if traits.signed_multipliers:
        return signed_multipliers(*shape, generator=generator)
    return random_integers(traits.multipliers, shape, torch.uint8, generator)


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
