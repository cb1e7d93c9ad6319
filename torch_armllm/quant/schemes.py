"""Weight formats: how a float matrix becomes small integers, one handler a scheme.

Every handler rounds to nearest and searches its scales by squared error, row chunk by row chunk, so that the
temporary memory stays at a few megabytes whatever the size of the matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.quant.workers import each

GROUP = 32
"""Values along K that share a scale or a multiplier."""
PANEL = 16
"""Output rows of one packed panel."""
_CHUNK = 1 << 17
"""Weights searched at once: their temporaries fit a core's second-level cache."""


@dataclass(frozen=True)
class Quantised:
    """A weight of N rows and K columns as integers.

    Attributes:
        scheme: name of the scheme.
        q: int8 (N, K).
        scales: float32 (N,), or (N, G) with one a group of 32.
        multipliers: uint8 (N, G) in 1…16, for ``g32i`` alone.
    """

    scheme: str
    q: Tensor
    scales: Tensor
    multipliers: Tensor | None = None


class Scheme(ABC):
    """Turns float weights into integers and back."""

    name: str

    @abstractmethod
    def bits(self, columns: int) -> float:
        """Bits a weight of the packed form, for rows of ``columns`` values."""

    @abstractmethod
    def quantise_rows(self, weight: Tensor, importance: Tensor | None = None) -> Quantised:
        """Quantises float32 rows of shape (r, G, 32); the result's `q` is (r, G·32).

        Squared errors count by ``importance`` (G, 32), where it is given.
        """

    def dequantize(self, quantised: Quantised) -> Tensor:
        """The float32 matrix (N, K) that the integers stand for."""
        value = quantised.q.float()
        rows, columns = value.shape
        if quantised.multipliers is not None:
            value *= _spread(quantised.multipliers.float(), columns)
        if quantised.scales.dim() == 2:
            return value * _spread(quantised.scales, columns)
        return value * quantised.scales[:, None]

    def quantise_chunk(
        self, weight: Tensor, importance: Tensor | None = None
    ) -> tuple[Quantised, float, float]:
        """Quantises a few rows (r, K) of any float type; ``importance`` is (K,).

        Returns:
            The integers, Σ(W − Ŵ)² and ΣW².

        Raises:
            ValueError: the weight is not a float matrix or holds a NaN or an infinity.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"{self.name} quantises float matrices (N, K), "
                f"got {weight.dtype} of shape {tuple(weight.shape)}"
            )
        columns = weight.shape[1]
        groups = math.ceil(columns / GROUP)
        value = weight.float()
        energy = float(value.square().sum())
        if not math.isfinite(energy) and not bool(value.isfinite().all()):
            raise ValueError("the weight holds a NaN or an infinity: the checkpoint is damaged")
        padded = torch.nn.functional.pad(value, (0, groups * GROUP - columns))
        if importance is not None:
            importance = torch.nn.functional.pad(importance, (0, groups * GROUP - columns)).view(
                groups, GROUP
            )
        found = self.quantise_rows(padded.view(-1, groups, GROUP), importance)
        cut = Quantised(self.name, found.q[:, :columns].contiguous(), found.scales, found.multipliers)
        return cut, float((value - self.dequantize(cut)).square().sum()), energy

    def quantize(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Quantised, float]:
        """Quantises a float matrix (N, K); K need not be a multiple of 32.

        Args:
            weight: the matrix.
            importance: (K,), what a squared error in each column counts; all the same by default.

        Returns:
            The integers, and the relative round-trip error ‖W − Ŵ‖ / ‖W‖.
        """
        parts = each(lambda rows: self.quantise_chunk(weight[rows], importance), row_chunks(*weight.shape))
        pieces = [part[0] for part in parts]
        multipliers = [p.multipliers for p in pieces if p.multipliers is not None]
        whole = Quantised(
            self.name,
            torch.cat([p.q for p in pieces]),
            torch.cat([p.scales for p in pieces]),
            torch.cat(multipliers) if multipliers else None,
        )
        return whole, relative_error(sum(p[1] for p in parts), sum(p[2] for p in parts))


class G32I(Scheme):
    """``w = s_row · (m_group · q)``, q in −8…7, m in 1…16: float group scales' accuracy with integer sums.

    The progressive quantisation of QServe (arXiv 2405.04532).  `m·q` fits INT8.  The row scale comes from
    the row's peak, then from a least-squares fit to the integers found; multipliers are searched at both.
    """

    name = "g32i"
    clipped = 5
    """Multipliers tried a group: from the one that clips nothing downwards."""

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + 4 / GROUP + 32 / columns

    def quantise_rows(self, weight: Tensor, importance: Tensor | None = None) -> Quantised:  # noqa: D102
        peak = weight.abs().amax(dim=2)
        scale = peak.amax(dim=1) / (7.5 * 16)
        # The heavier tail is best kept on −8, the longer side: a negative row scale puts it there.
        tail = (weight * weight * weight).sum(dim=(1, 2))
        scale = torch.where(tail > 0, -scale, scale)
        widest = torch.ceil(peak * _inverse(scale).abs()[:, None] / 7)
        value = weight * _inverse(scale)[:, None, None]
        steps = [(widest - step).clamp_(1, 16) for step in range(self.clipped)]
        multiplier, q = _search(value, steps, importance)
        scale = _fit(weight, q, multiplier, importance)
        value = weight * _inverse(scale)[:, None, None]
        steps = [multiplier, *((multiplier + step).clamp_(1, 16) for step in (1, -1))]
        multiplier, q = _search(value, steps, importance)
        scale = _fit(weight, q, multiplier, importance)
        return Quantised(self.name, q.flatten(1).to(torch.int8), scale, multiplier.to(torch.uint8))


class G32(Scheme):
    """One float scale a group of 32 values, q in −8…7: the layout of GPTQ, AWQ and GGUF files."""

    name = "g32"
    shrink = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + 32 / GROUP

    def quantise_rows(self, weight: Tensor, importance: Tensor | None = None) -> Quantised:  # noqa: D102
        scale = weight.abs().amax(dim=2) / 7
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        scale, q = _search(weight, [scale * factor for factor in self.shrink], importance)
        return Quantised(self.name, q.flatten(1).to(torch.int8), scale)


class Row(Scheme):
    """One float scale a whole row, q in −8…7: the smallest and fastest, and the least accurate."""

    name = "row"
    shrink = tuple(1.0 - 0.07 * step for step in range(10))

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + 32 / columns

    def quantise_rows(self, weight: Tensor, importance: Tensor | None = None) -> Quantised:  # noqa: D102
        flat = weight.flatten(1)[:, None]
        scale = flat.abs().amax(dim=2) / 7
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        flat_importance = None if importance is None else importance.flatten()[None]
        scale, q = _search(flat, [scale * factor for factor in self.shrink], flat_importance)
        return Quantised(self.name, q.flatten(1).to(torch.int8), scale[:, 0])


class Int8(Scheme):
    """One float scale a row, q in −127…127: for the output head."""

    name = "int8"

    def bits(self, columns: int) -> float:  # noqa: D102
        return 8 + 32 / columns

    def quantise_rows(self, weight: Tensor, importance: Tensor | None = None) -> Quantised:  # noqa: D102
        flat = weight.flatten(1)
        scale = flat.abs().amax(dim=1) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(flat / scale[:, None]).clamp_(-127, 127)
        return Quantised(self.name, q.to(torch.int8), scale)


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (G32I(), G32(), Row(), Int8())}


def scheme_named(name: str) -> Scheme:
    """The handler of a scheme.

    Raises:
        ValueError: there is no such scheme.
    """
    if name not in SCHEMES:
        raise ValueError(f"unknown quantisation scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Row ranges to quantise one by one; all but the last hold whole panels."""
    step = max(1, _CHUNK // max(columns, 1) // PANEL) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def relative_error(error: float, energy: float) -> float:
    """‖W − Ŵ‖ / ‖W‖ from the two sums of squares; 0 for a weight of zeros."""
    return math.sqrt(error / energy) if energy > 0 else 0.0


def _spread(per_group: Tensor, columns: int) -> Tensor:
    return per_group.repeat_interleave(GROUP, dim=1)[:, :columns]


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > 1e-30, 1 / scale, torch.zeros_like(scale))


def _fit(weight: Tensor, q: Tensor, multiplier: Tensor, importance: Tensor | None) -> Tensor:
    """The row scale with the least squared error for given integers; 0 for a row of zeros."""
    level = q * multiplier[..., None]
    counted = level if importance is None else level * importance
    moment = (level * counted).sum(dim=(1, 2))
    return (weight * counted).sum(dim=(1, 2)) / torch.where(moment == 0, torch.ones_like(moment), moment)


def _search(value: Tensor, candidates: list[Tensor], importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Picks, for each (r, G), the scale among `candidates` with the least squared error of `value` (r, G, n).

    Errors count by ``importance`` (G, n), where it is given.

    Returns:
        The scales (r, G), and the rounded values in −8…7 as floats (r, G, n).
    """
    best = candidates[0]
    least = torch.full_like(best, math.inf)
    buffer = torch.empty_like(value)
    root = None if importance is None else importance.sqrt()
    for scale in candidates:
        factor = scale[..., None]
        torch.mul(value, 1 / factor, out=buffer)
        buffer.round_().clamp_(-8, 7).mul_(factor).sub_(value)
        if root is not None:
            buffer.mul_(root)
        error = torch.linalg.vector_norm(buffer, dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    torch.mul(value, 1 / best[..., None], out=buffer)
    return best, buffer.round_().clamp_(-8, 7)
