"""The grid of values that a scheme can represent, while its integers are searched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops.linear import GROUP, SchemeTraits
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.registry import scheme_named
from torch_armllm.quant.schemes.scale_search import inverse


@dataclass
class Grid:
    """Integers times a step per row and group of columns; rows run along the last axis.

    Attributes:
        name: name of the scheme.
        span: columns per group; rows with a single step are cut into groups, too.
        row: float32 (N,), a factor of every step of a row; ones if groups have float steps.
        factor: float32 (G, N), the step of a group divided by ``row``; may be negative.
        zero: float32 (G, N), zero points, or None.
        low, high: bounds of the stored integers.
    """

    name: str
    span: int
    row: Tensor
    factor: Tensor
    zero: Tensor | None
    low: int
    high: int

    @property
    def traits(self) -> SchemeTraits:
        """Traits of the scheme."""
        return scheme_named(self.name).traits

    @property
    def whole_factors(self) -> bool:
        """True if factors are integer multipliers."""
        return self.traits.multipliers is not None

    @property
    def signed_factors(self) -> bool:
        """True if factors are integer multipliers of either sign."""
        return self.traits.signed_multipliers

    @property
    def zero_range(self) -> tuple[int, int] | None:
        """Returns the least and the largest zero point that a group may take, or None to keep its own."""
        return scheme_named(self.name).zero_range

    @property
    def float_factors(self) -> bool:
        """True if factors are floats, one per group."""
        return self.traits.span > 0

    def steps(self, columns: Tensor) -> Tensor:
        """Returns the steps (n, N) of columns (n,)."""
        return self.factor[columns // self.span] * self.row

    def bounds(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest number of steps of columns (n,): each (n, N) or (n, 1)."""
        zero = torch.zeros(len(columns), 1) if self.zero is None else self.zero[columns // self.span]
        return self.low - zero, self.high - zero

    def stored(self, values: Tensor) -> Quantized:
        """Returns the integers of values (K, N) on the grid."""
        columns = torch.arange(values.shape[0])
        q = torch.round(values * inverse(self.steps(columns)))
        if self.zero is not None:
            q += self.zero[columns // self.span]
        q = q.clamp_(self.low, self.high).t().contiguous().to(torch.int8)
        zeros = None if self.zero is None else self.zero.t().contiguous().to(torch.uint8)
        if self.whole_factors:
            kind = torch.int8 if self.signed_factors else torch.uint8
            return Quantized(self.name, q, self.row, self.factor.t().contiguous().to(kind), zeros)
        if self.float_factors:
            kind = torch.bfloat16 if self.traits.bf16_scales else torch.float32
            return Quantized(self.name, q, self.factor.t().contiguous().to(kind), None, zeros)
        return Quantized(self.name, q, self.row, None, None if zeros is None else zeros[:, 0].contiguous())

    def round_factor(self, factor: Tensor) -> Tensor:
        """Rounds factors to those that the scheme can store."""
        if self.whole_factors:
            return factor.abs().round().clamp(1, self.traits.largest_multiplier).copysign(factor)
        return factor.bfloat16().float() if self.traits.bf16_scales else factor


def grid_of(quantized: Quantized) -> Grid:
    """Returns the grid of a quantized weight.

    Raises:
        ValueError: its scheme has offsets, which this grid does not represent.
    """
    if quantized.offsets is not None:
        raise ValueError(f"gptq cannot round to {quantized.scheme!r}: its groups have float offsets; use mse")
    columns, scheme = quantized.q.shape[1], scheme_named(quantized.scheme)
    span = scheme.span or GROUP
    groups = -(-columns // span)
    zero = None if quantized.zeros is None else quantized.zeros.float()
    if zero is not None:
        zero = zero.t().contiguous() if zero.dim() == 2 else zero.expand(groups, -1)
    scales = quantized.scales.float()
    if quantized.multipliers is not None:
        row, factor = scales, quantized.multipliers.float().t().contiguous()
    elif scales.dim() == 2:
        row, factor = torch.ones(len(scales)), scales.t().contiguous()
    else:
        row, factor = scales, torch.ones(groups, len(scales))
    return Grid(quantized.scheme, span, row, factor, zero, scheme.lowest, scheme.highest)
