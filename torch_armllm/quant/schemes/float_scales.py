"""Schemes with float scales: for groups of columns, or for whole rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.ops.linear import GROUP
from torch_armllm.quant.schemes.base import Quantized, Scheme
from torch_armllm.quant.schemes.scale_search import Levels, OtherLevels, best_steps, regroup


class Symmetric(Scheme):
    """A float scale for every ``span`` columns (0: for a whole row), q in −8…7, as in GPTQ and GGUF files."""

    shrink: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
    """Scales to try, as factors of the scale that clips nothing."""
    shrink_row = tuple(1.0 - 0.07 * step for step in range(10))
    """The same for whole rows."""
    levels: type[Levels] = Levels

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, importance = regroup(weight, importance, self.span)
        shrink = self.shrink if self.span else self.shrink_row
        candidates = self._candidates(value, shrink if search else (1.0,))
        levels = self.levels(self.lowest, self.highest)
        found = self._quantized(*best_steps(value, candidates, importance, levels))
        return replace(found, q=found.q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8))

    def _candidates(self, value: Tensor, shrink: Sequence[float]) -> Iterator[tuple[Tensor, int | Tensor]]:
        """Yields the scales (r, S) to try for values (r, S, n), each with zero points or offsets."""
        scale = _not_zero(value.abs().amax(dim=2) / self.highest)
        for factor in shrink:
            yield self._representable(scale * factor), 0

    def _quantized(self, scale: Tensor, shift: Tensor, q: Tensor) -> Quantized:
        """Returns the result of a search; q (r, S, n) as it is."""
        return Quantized(self.name, q, self._stored(scale))

    def _representable(self, scale: Tensor) -> Tensor:
        return scale.bfloat16().float() if self.traits.bf16_scales else scale

    def _stored(self, scale: Tensor) -> Tensor:
        return self._by_row(scale.bfloat16() if self.traits.bf16_scales else scale)

    def _by_row(self, values: Tensor) -> Tensor:
        return values if self.span else values[:, 0]


class _Quotients(OtherLevels):
    """Levels that are found by division, whose results the product with a reciprocal may miss."""

    def round(self, value: Tensor, step: Tensor, zero: int | Tensor, out: Tensor) -> None:
        self.clamp(torch.div(value, step[..., None], out=out).round_(), zero)


class Asymmetric(Symmetric):
    """``w = s · (q − z)`` with q and the zero point z in 0…15: the layout of AWQ files."""

    levels = _Quotients

    def _candidates(self, value: Tensor, shrink: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        low, high = value.amin(dim=2).clamp_(max=0), value.amax(dim=2).clamp_(min=0)
        for factor in shrink:
            scale = _not_zero(self._representable((high - low) * (factor / self.highest)))
            yield scale, torch.round(-low * factor / scale).clamp_(self.lowest, self.highest)

    def _quantized(self, scale: Tensor, shift: Tensor, q: Tensor) -> Quantized:
        zeros = self._by_row(shift.to(torch.uint8))
        return Quantized(self.name, q.add_(shift[..., None]), self._stored(scale), zeros=zeros)


class _Offsets(OtherLevels):
    """Levels ``step · q + offset``."""

    def round(self, value: Tensor, step: Tensor, offset: int | Tensor, out: Tensor) -> None:
        assert isinstance(offset, Tensor)
        torch.sub(value, offset[..., None], out=out).div_(step[..., None]).round_()
        out.clamp_(self.lowest, self.highest)

    def restore(self, q: Tensor, step: Tensor, offset: int | Tensor) -> None:
        assert isinstance(offset, Tensor)
        q.mul_(step[..., None]).add_(offset[..., None])


class Offset(Symmetric):
    """``w = s · q + c`` with a float offset c for every ``span`` columns: GGUF's Q4_1, torchao's INT4."""

    levels = _Offsets

    def _candidates(self, value: Tensor, shrink: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        low, high = value.amin(dim=2), value.amax(dim=2)
        middle = 0.5 * (self.lowest + self.highest)
        for factor in shrink:
            scale = _not_zero((high - low) * (factor / (self.highest - self.lowest)))
            yield scale, torch.where(high > low, 0.5 * (high + low) - middle * scale, low)

    def _quantized(self, scale: Tensor, shift: Tensor, q: Tensor) -> Quantized:
        return Quantized(self.name, q, scale, offsets=shift)


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 1e-30, scale, torch.ones_like(scale))
