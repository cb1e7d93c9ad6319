"""Schemes with integer multipliers for groups of 32 columns, so that sums over a row stay integers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import Quantized, Scheme
from torch_armllm.quant.schemes.scale_search import Candidate, Levels, best_steps, inverse


class _Multipliers(Scheme):
    """``w = s_row · m_group · (q − z_group)``, with multipliers and zero points of the least squared error.

    The first row scale comes from the row's largest values, the second from a least-squares fit to the
    integers.  Multipliers and zero points are searched with either scale.
    """

    def __init__(self, name: str, clipped: int) -> None:
        """``clipped``: multipliers tried per group, downward from the smallest that clips nothing."""
        super().__init__(name)
        self._clipped = clipped

    @abstractmethod
    def _row_scale(self, weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Returns scales (r,) with which the largest multiplier clips nothing; groups span (r, G)."""

    @abstractmethod
    def _widest(self, low: Tensor, high: Tensor, zero: int) -> Tensor:
        """Returns the smallest multipliers (r, G) that clip nothing; may exceed the largest of the scheme."""

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        low, high = weight.amin(dim=2).clamp_(max=0), weight.amax(dim=2).clamp_(min=0)
        scale = self._row_scale(weight, low, high)
        reciprocal = inverse(scale)[:, None]
        first = self._candidates(low * reciprocal, high * reciprocal, self._clipped if search else 1)
        multiplier, zeros, q = self._best(weight, scale, first, importance)
        if search:
            scale = _fit(weight, q, multiplier, importance)
            multiplier, zeros, q = self._best(weight, scale, self._neighbors(multiplier, zeros), importance)
            scale = _fit(weight, q, multiplier, importance)
        if self.zero_range is not None:
            q += zeros[..., None]
        return Quantized(
            self.name,
            q.flatten(1).to(torch.int8),
            scale,
            multiplier.to(torch.int8 if self.signed_multipliers else torch.uint8),
            None if self.zero_range is None else zeros.to(torch.uint8),
        )

    def _best(
        self, weight: Tensor, scale: Tensor, candidates: Sequence[Candidate], importance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        value = weight * inverse(scale)[:, None, None]
        return best_steps(value, candidates, importance, Levels(self.lowest, self.highest))

    def _candidates(self, low: Tensor, high: Tensor, count: int) -> list[Candidate]:
        """Returns ``count`` multipliers for each zero point, for groups that span (r, G) in row scales."""
        found: list[Candidate] = []
        least, most = self.zero_range or (0, 0)
        largest = self.traits.largest_multiplier
        for zero in range(least, most + 1):
            widest = self._widest(low, high, zero)
            found += [((widest - less).clamp_(1, largest), zero) for less in range(count)]
        if self.signed_multipliers:
            found += [(-multiplier, zero) for multiplier, zero in found]
        return found

    def _neighbors(self, multiplier: Tensor, zeros: Tensor) -> list[Candidate]:
        """Returns a choice of multipliers and zero points, and those next to it."""
        zero = 0 if self.zero_range is None else zeros
        found: list[Candidate] = [(multiplier, zero)]
        for more in (1, -1):
            size = (multiplier.abs() + more).clamp_(1, self.traits.largest_multiplier)
            found.append((size.copysign_(multiplier), zero))
        if self.zero_range is not None:
            found += [(multiplier, (zeros + more).clamp_(*self.zero_range)) for more in (1, -1)]
        return found


class Multiplied(_Multipliers):
    """``w = s_row · (m_group · q)``: accuracy of float group scales, integer sums; `m·q` fits INT8.

    ``g32i`` is the progressive quantization of QServe (arXiv 2405.04532).  The signs of ``int3`` turn the
    longer side of a group's range to its longer tail: of eight values, that lowers the error by a twelfth.
    """

    def _row_scale(self, weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
        middle = 0.5 * (self.highest - self.lowest)
        scale = torch.maximum(low.abs(), high.abs()).amax(dim=1) / (middle * self.traits.largest_multiplier)
        if self.signed_multipliers:
            return scale
        # The integer range reaches further on the negative side.  A negative row scale maps the heavier tail
        # there.
        tail = (weight * weight * weight).sum(dim=(1, 2))
        return torch.where(tail > 0, -scale, scale)

    def _widest(self, low: Tensor, high: Tensor, zero: int) -> Tensor:
        return torch.ceil(torch.maximum(low.abs(), high.abs()) / self.highest)


class MultipliedWithZeros(_Multipliers):
    """``w = s_row · (m_group · (q − z_group))``: `Multiplied` with zero points.

    A group's range leans to its longer tail, which lowers the squared error by a sixth for 1/16 bit.  With
    four zero points, ``m·(q − z)`` fits INT8 at nearly the multipliers of ``g32i``.
    """

    def _row_scale(self, weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
        # A group as wide as its range, or as its longest tail, fits the largest multiplier.
        assert self.zero_range is not None
        tail = torch.maximum(high, -low) / self.zero_range[1]
        return torch.maximum((high - low) / self.highest, tail).amax(dim=1) / self.traits.largest_multiplier

    def _widest(self, low: Tensor, high: Tensor, zero: int) -> Tensor:
        return torch.ceil(torch.maximum(high / (self.highest - zero), -low / zero))


class Unclipped(Scheme):
    """``w = s_row · (m_group · q)`` with the integer sums of INT8, such as ``int6``.

    The row scale maps the row's largest weight to the largest multiplier times half the number of values, so
    ``m·q`` fits INT8; a group has the smallest multiplier at which no value moves by more than half a step.
    Groups of small weights are as fine as INT8.
    """

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        middle, largest = 0.5 * (self.highest - self.lowest), self.traits.largest_multiplier
        peak = weight.abs().amax(dim=2)
        scale = peak.amax(dim=1) / (middle * largest)
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        multiplier = torch.ceil(peak / scale[:, None] / middle).clamp_(1, largest)
        q = torch.round(weight / (scale[:, None] * multiplier)[..., None]).clamp_(self.lowest, self.highest)
        return Quantized(self.name, q.flatten(1).to(torch.int8), scale, multiplier.to(torch.uint8))


def _fit(weight: Tensor, q: Tensor, multiplier: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the row scale with the least squared error for given integers; 0 for a row of zeros."""
    level = q * multiplier[..., None]
    counted = level if importance is None else level * importance
    moment = (level * counted).sum(dim=(1, 2))
    return (weight * counted).sum(dim=(1, 2)) / torch.where(moment == 0, torch.ones_like(moment), moment)
