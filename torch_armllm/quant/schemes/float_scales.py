"""Schemes with float scales: for groups of columns, or for whole rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import GROUP, Quantized, Scheme
from torch_armllm.quant.schemes.scale_search import best_steps, regroup


class Symmetric(Scheme):
    """A float scale for every ``span`` columns (0: for a whole row), q in −8…7, as in GPTQ and GGUF files."""

    shrink: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
    shrink_row = tuple(1.0 - 0.07 * step for step in range(10))

    def __init__(self, name: str, span: int, bfloat16: bool = False) -> None:
        self.name, self.span, self.bfloat16 = name, span, bfloat16

    def _factors(self, search: bool) -> tuple[float, ...]:
        """Returns the scales to try, as factors of the scale that clips nothing."""
        if not search:
            return (1.0,)
        return self.shrink if self.span else self.shrink_row

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + (16 if self.bfloat16 else 32) / (self.span or columns)

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, importance = regroup(weight, importance, self.span)
        scale = value.abs().amax(dim=2) / 7
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        candidates = [_rounded(scale * factor, self.bfloat16) for factor in self._factors(search)]
        pairs = [(scale, 0) for scale in candidates]
        scale, _, q = best_steps(value, pairs, importance, self.lowest, self.highest)
        q = q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8)
        return Quantized(self.name, q, _stored(scale, self.span, self.bfloat16))


class Asymmetric(Symmetric):
    """``w = s · (q − z)`` with q and the zero point z in 0…15: the layout of AWQ files."""

    lowest, highest = 0, 15

    def bits(self, columns: int) -> float:  # noqa: D102
        return super().bits(columns) + 4 / (self.span or columns)

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, importance = regroup(weight, importance, self.span)
        low, high = value.amin(dim=2).clamp(max=0), value.amax(dim=2).clamp(min=0)
        best, best_zero = torch.ones_like(low), torch.zeros_like(low)
        least = torch.full_like(low, math.inf)
        for factor in self._factors(search):
            scale = _rounded((high - low) * (factor / 15), self.bfloat16)
            scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
            zero = torch.round(-low * factor / scale).clamp_(0, 15)
            error = (_levels(value, scale, zero) - zero[..., None]).mul_(scale[..., None]).sub_(value)
            if importance is not None:
                error.mul_(importance.sqrt())
            size = torch.linalg.vector_norm(error, dim=-1)
            better = size < least
            least = torch.where(better, size, least)
            best, best_zero = torch.where(better, scale, best), torch.where(better, zero, best_zero)
        q = _levels(value, best, best_zero).flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8)
        zeros = best_zero.to(torch.uint8) if self.span else best_zero[:, 0].to(torch.uint8)
        return Quantized(self.name, q, _stored(best, self.span, self.bfloat16), None, zeros)


class Offset(Symmetric):
    """``w = s · q + c`` with a float offset c for every ``span`` columns: GGUF's Q4_1, torchao's INT4."""

    def bits(self, columns: int) -> float:  # noqa: D102
        return super().bits(columns) + 32 / self.span

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, importance = regroup(weight, importance, self.span)
        low, high = value.amin(dim=2), value.amax(dim=2)
        half = 0.5 * (self.lowest + self.highest)
        best, best_q, best_offset = low, value, high
        least = torch.full_like(low, math.inf)
        for factor in self.shrink if search else (1.0,):
            scale = (high - low) * (factor / (self.highest - self.lowest))
            scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
            offset = torch.where(high > low, 0.5 * (high + low) - half * scale, low)
            q = ((value - offset[..., None]) / scale[..., None]).round_().clamp_(self.lowest, self.highest)
            error = (q * scale[..., None]).add_(offset[..., None]).sub_(value)
            if importance is not None:
                error.mul_(importance.sqrt())
            size = torch.linalg.vector_norm(error, dim=-1)
            better = size < least
            least = torch.where(better, size, least)
            best, best_offset = torch.where(better, scale, best), torch.where(better, offset, best_offset)
            best_q = torch.where(better[..., None], q, best_q)
        q = best_q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8)
        return Quantized(self.name, q, best, offsets=best_offset)


def _rounded(scale: Tensor, bfloat16: bool) -> Tensor:
    return scale.bfloat16().float() if bfloat16 else scale


def _stored(scale: Tensor, span: int, bfloat16: bool) -> Tensor:
    scale = scale.bfloat16() if bfloat16 else scale
    return scale if span else scale[:, 0]


def _levels(value: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.round(value / scale[..., None]).add_(zero[..., None]).clamp_(0, 15)
