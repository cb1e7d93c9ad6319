"""Registry of the weight quantization schemes: one handler for each scheme.

Every handler rounds to nearest.  Scales come from the absolute maximum or from a search for the least squared
error.  The caller passes rows in chunks, so temporary memory stays at a few megabytes for any matrix size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import GROUP, Quantized, Scheme


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
        widest = torch.ceil(peak * _inverse(scale).abs()[:, None] / self.highest)
        value = weight * _inverse(scale)[:, None, None]
        steps = [
            (widest - step).clamp_(1, self.largest_multiplier)
            for step in range(self.clipped if search else 1)
        ]
        multiplier, q = self._best(value, self._of_both_signs(steps), importance)
        if not search:
            return self._integers(q, scale, multiplier)
        scale = _fit(weight, q, multiplier, importance)
        value = weight * _inverse(scale)[:, None, None]
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
        return _search(value, multipliers, importance, self.lowest, self.highest)

    def _integers(self, q: Tensor, scale: Tensor, multiplier: Tensor) -> Quantized:
        kind = torch.int8 if self.signed_multipliers else torch.uint8
        return Quantized(self.name, q.flatten(1).to(torch.int8), scale, multiplier.to(kind))


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
        value, importance = _regroup(weight, importance, self.span)
        scale = value.abs().amax(dim=2) / 7
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        candidates = [_rounded(scale * factor, self.bfloat16) for factor in self._factors(search)]
        scale, q = _search(value, candidates, importance)
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
        value, importance = _regroup(weight, importance, self.span)
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


class Int8(Scheme):
    """One float scale per row, q in −127…127: for the output head, or for all layers."""

    name = "int8"
    lowest, highest = -127, 127

    def bits(self, columns: int) -> float:  # noqa: D102
        return 8 + 32 / columns

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        flat = weight.flatten(1)
        scale = flat.abs().amax(dim=1) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(flat / scale[:, None]).clamp_(-127, 127)
        return Quantized(self.name, q.to(torch.int8), scale)


class Offset(Symmetric):
    """``w = s · q + c`` with a float offset c for every ``span`` columns: GGUF's Q4_1, torchao's INT4."""

    def bits(self, columns: int) -> float:  # noqa: D102
        return super().bits(columns) + 32 / self.span

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, importance = _regroup(weight, importance, self.span)
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


class Int8Groups(Scheme):
    """A float scale for every ``span`` columns, q in −127…127: GGUF's Q8_0."""

    lowest, highest = -127, 127

    def __init__(self, span: int) -> None:
        self.name, self.span = f"int8g{span}", span

    def bits(self, columns: int) -> float:  # noqa: D102
        return 8 + 32 / self.span

    def quantize_rows(  # noqa: D102
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        value, _ = _regroup(weight, None, self.span)
        scale = value.abs().amax(dim=2) / 127
        scale = torch.where(scale > 1e-30, scale, torch.ones_like(scale))
        q = torch.round(value / scale[..., None]).clamp_(-127, 127)
        return Quantized(self.name, q.flatten(1)[:, : weight.shape[1] * GROUP].to(torch.int8), scale)


class Int8Offset(Offset):
    """``w = s · q + c`` with q in −128…127: GGUF's Q5_1 and Q5_K."""

    lowest, highest = -128, 127
    shrink = (1.0,)

    def bits(self, columns: int) -> float:  # noqa: D102
        return 4 + super().bits(columns)


_HANDLERS: tuple[Scheme, ...] = (
    G32I(),
    Symmetric("g32", 32),
    Symmetric("row", 0),
    Int8(),
    Int6(),
    Int3(),
    Symmetric("g64", 64),
    Symmetric("g128", 128),
    Asymmetric("rowz", 0),
    *(Asymmetric(f"g{span}z", span) for span in (32, 64, 128)),
    *(Symmetric(f"g{span}b", span, True) for span in (32, 64, 128)),
    *(Asymmetric(f"g{span}zb", span, True) for span in (32, 64, 128)),
    *(Offset(f"g{span}m", span) for span in (32, 64, 128)),
    *(Int8Groups(span) for span in (32, 64, 128)),
    *(Int8Offset(f"int8g{span}m", span) for span in (32, 64, 128)),
)
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _HANDLERS}


DEFAULT = "g32i"


def scheme_named(name: str) -> Scheme:
    """Returns the handler of a scheme; ``int4`` names the default scheme.

    Raises:
        ValueError: no scheme has this name.
    """
    name = DEFAULT if name == "int4" else name
    if not isinstance(name, str) or name not in SCHEMES:
        raise ValueError(f"unknown quantization scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def _regroup(weight: Tensor, importance: Tensor | None, span: int) -> tuple[Tensor, Tensor | None]:
    """Reshapes rows (r, G, 32) and importance (G, 32) to (r, S, span) and (S, span), padded with zeros."""
    flat = weight.flatten(1)
    columns = flat.shape[1]
    span = span or columns
    short = -columns % span
    value = torch.nn.functional.pad(flat, (0, short)).view(flat.shape[0], -1, span)
    if importance is None:
        return value, None
    return value, torch.nn.functional.pad(importance.flatten(), (0, short)).view(-1, span)


def _rounded(scale: Tensor, bfloat16: bool) -> Tensor:
    return scale.bfloat16().float() if bfloat16 else scale


def _stored(scale: Tensor, span: int, bfloat16: bool) -> Tensor:
    scale = scale.bfloat16() if bfloat16 else scale
    return scale if span else scale[:, 0]


def _levels(value: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.round(value / scale[..., None]).add_(zero[..., None]).clamp_(0, 15)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > 1e-30, 1 / scale, torch.zeros_like(scale))


def _fit(weight: Tensor, q: Tensor, multiplier: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the row scale with the least squared error for given integers; 0 for a row of zeros."""
    level = q * multiplier[..., None]
    counted = level if importance is None else level * importance
    moment = (level * counted).sum(dim=(1, 2))
    return (weight * counted).sum(dim=(1, 2)) / torch.where(moment == 0, torch.ones_like(moment), moment)


def _search(
    value: Tensor,
    candidates: list[Tensor],
    importance: Tensor | None,
    lowest: int = Scheme.lowest,
    highest: int = Scheme.highest,
) -> tuple[Tensor, Tensor]:
    """Picks, for each (r, G), the scale among `candidates` with the least squared error of `value` (r, G, n).

    Squared errors are weighted by ``importance`` (G, n), unless it is None.

    Returns:
        The scales (r, G), and the rounded values in ``lowest`` … ``highest`` as floats (r, G, n).
    """
    best = candidates[0]
    least = torch.full_like(best, math.inf)
    buffer = torch.empty_like(value)
    root = None if importance is None else importance.sqrt()
    for scale in candidates:
        factor = scale[..., None]
        torch.mul(value, 1 / factor, out=buffer)
        buffer.round_().clamp_(lowest, highest).mul_(factor).sub_(value)
        if root is not None:
            buffer.mul_(root)
        error = torch.linalg.vector_norm(buffer, dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    torch.mul(value, 1 / best[..., None], out=buffer)
    return best, buffer.round_().clamp_(lowest, highest)
