"""Schemes with integer multipliers for groups of 32 columns, so that sums over a row stay integers."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import GROUP, Quantized, Scheme
from torch_armllm.quant.schemes.scale_search import best_steps, inverse


class G32I(Scheme):
    """``w = s_row · (m_group · q)``, q in −8…7, m in 1…16: accuracy of float group scales, integer sums.

    This is the progressive quantization of QServe (arXiv 2405.04532); `m·q` fits INT8.  The first row scale
    comes from the row's absolute maximum, the second from a least-squares fit to the integers.  The group
    multipliers are searched with either scale.
    """

    name = "g32i"
    largest_multiplier = 16
    clipped = 5
    """Number of multipliers tried per group, downward from the smallest that clips nothing."""

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + 4 / GROUP + 32 / columns

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        peak = weight.abs().amax(dim=2)
        middle = 0.5 * (self.highest - self.lowest)
        scale = peak.amax(dim=1) / (middle * self.largest_multiplier)
        if not self.signed_multipliers:
            # The integer range reaches further on the negative side.  A negative row scale maps the heavier
            # tail there.
            tail = (weight * weight * weight).sum(dim=(1, 2))
            scale = torch.where(tail > 0, -scale, scale)
        widest = torch.ceil(peak * inverse(scale).abs()[:, None] / self.highest)
        value = weight * inverse(scale)[:, None, None]
        steps = [
            (widest - step).clamp_(1, self.largest_multiplier)
            for step in range(self.clipped if search else 1)
        ]
        multiplier, q = self._best(value, self._of_both_signs(steps), importance)
        if not search:
            return self._integers(q, scale, multiplier)
        scale = _fit(weight, q, multiplier, importance)
        value = weight * inverse(scale)[:, None, None]
        steps = [multiplier, *(self._resized(multiplier, step) for step in (1, -1))]
        multiplier, q = self._best(value, steps, importance)
        scale = _fit(weight, q, multiplier, importance)
        return self._integers(q, scale, multiplier)

    def _resized(self, multiplier: Tensor, step: int) -> Tensor:
        """Adds ``step`` to the size of multipliers, which keep their signs."""
        return (multiplier.abs() + step).clamp_(1, self.largest_multiplier).copysign_(multiplier)

    def _of_both_signs(self, multipliers: list[Tensor]) -> list[Tensor]:
        return [*multipliers, *(-m for m in multipliers)] if self.signed_multipliers else multipliers

    def _best(
        self, value: Tensor, multipliers: list[Tensor], importance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        pairs = [(multiplier, 0) for multiplier in multipliers]
        multiplier, _, q = best_steps(value, pairs, importance, self.lowest, self.highest)
        return multiplier, q

    def _integers(self, q: Tensor, scale: Tensor, multiplier: Tensor) -> Quantized:
        kind = torch.int8 if self.signed_multipliers else torch.uint8
        return Quantized(self.name, q.flatten(1).to(torch.int8), scale, multiplier.to(kind))


class G32IZ(G32I):
    """``w = s_row · (m_group · (q − z_group))``, q in 0…15, m in 1…14, z in 6…9: `G32I` with zero points.

    A group's range leans to its longer tail, which lowers the squared error by a sixth for 1/16 bit.  With
    four zero points, ``m·(q − z)`` fits INT8 at nearly the multipliers of `G32I`.
    """

    name = "g32iz"
    lowest, highest, largest_multiplier, zero_range = 0, 15, 14, (6, 9)
    clipped = 3

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + 6 / GROUP + 32 / columns

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        first, last = self.zero_range
        low, high = weight.amin(dim=2).clamp_(max=0), weight.amax(dim=2).clamp_(min=0)
        # A group as wide as its range, or as its longest tail, fits the largest multiplier.
        step = torch.maximum((high - low) / self.highest, torch.maximum(high, -low) / last)
        scale = step.amax(dim=1) / self.largest_multiplier
        reciprocal = inverse(scale)[:, None]
        low, high = low * reciprocal, high * reciprocal
        pairs: list[tuple[Tensor, int | Tensor]] = []
        for zero in range(first, last + 1):
            widest = torch.ceil(torch.maximum(high / (self.highest - zero), -low / zero))
            pairs += [(self._fits(widest - by), zero) for by in range(self.clipped if search else 1)]
        multiplier, zeros, q = best_steps(
            weight * reciprocal[..., None], pairs, importance, self.lowest, self.highest
        )
        if search:
            scale = _fit(weight, q, multiplier, importance)
            pairs = [(multiplier, zeros), *((self._fits(multiplier + by), zeros) for by in (1, -1))]
            pairs += [(multiplier, (zeros + by).clamp_(first, last)) for by in (1, -1)]
            multiplier, zeros, q = best_steps(
                weight * inverse(scale)[:, None, None], pairs, importance, self.lowest, self.highest
            )
            scale = _fit(weight, q, multiplier, importance)
        q = (q + zeros[..., None]).flatten(1).to(torch.int8)
        return Quantized(self.name, q, scale, multiplier.to(torch.uint8), zeros.to(torch.uint8))

    def _fits(self, multiplier: Tensor) -> Tensor:
        return multiplier.clamp(1, self.largest_multiplier)


class Int3(G32I):
    """``w = s_row · (m_group · q)``, q in −4…3, m in ±1…±16: `G32I` with 3 bits, for layers that bear it.

    A sign for each group turns the longer side of the range to its longer tail: of eight values, that lowers
    the error by a twelfth.
    """

    name = "int3"
    lowest, highest, signed_multipliers = -4, 3, True
    clipped = 7

    def bits(self, columns: int) -> float:  # noqa: D102
        return 3 + 5 / GROUP + 32 / columns


class Int6(Scheme):
    """``w = s_row · (m_group · q)``, q in −32…31, m in 1…4: 6 bits with the integer sums of INT8.

    The row scale maps the row's largest weight to 4 · 31.5, so ``m·q`` fits INT8; a group has the smallest
    multiplier at which no value moves by more than half a step.  Groups of small weights are as fine as INT8.
    """

    name = "int6"
    lowest, highest, largest_multiplier = -32, 31, 4

    def bits(self, columns: int) -> float:  # noqa: D102
        return 6 + 2 / GROUP + 32 / columns

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        peak = weight.abs().amax(dim=2)
        scale = peak.amax(dim=1) / 126
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        multiplier = torch.ceil(peak / scale[:, None] / 31.5).clamp_(1, 4)
        q = torch.round(weight / (scale[:, None] * multiplier)[..., None]).clamp_(-32, 31)
        return Quantized(self.name, q.flatten(1).to(torch.int8), scale, multiplier.to(torch.uint8))


def _fit(weight: Tensor, q: Tensor, multiplier: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the row scale with the least squared error for given integers; 0 for a row of zeros."""
    level = q * multiplier[..., None]
    counted = level if importance is None else level * importance
    moment = (level * counted).sum(dim=(1, 2))
    return (weight * counted).sum(dim=(1, 2)) / torch.where(moment == 0, torch.ones_like(moment), moment)
