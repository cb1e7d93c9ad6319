"""The interface of weight schemes and roundings: float matrices to integers, a few rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.linear import GROUP, PANEL, SchemeTraits, traits_of
from torch_armllm.quant.parallel import each

CHUNK = 1 << 18
"""Weights rounded together: enough to outweigh the calls, few enough to be spread over many cores."""


@dataclass(frozen=True)
class Quantized:
    """A weight of N rows and K columns as integers.

    Attributes:
        scheme: name of the scheme.
        q: int8 (N, K).
        scales: float32 (N,), or float32 or bfloat16 (N, S) with one per group of columns.
        multipliers: (N, G), uint8, or int8 if they have signs, in `SchemeTraits.multipliers`; None for
            schemes that have none.
        zeros: uint8 0…15 of the shape of ``scales``, for schemes with zero points; 6…9 of that of
            ``multipliers`` for ``g32iz``.
        offsets: float32 of the shape of ``scales``, for schemes that have them.
    """

    scheme: str
    q: Tensor
    scales: Tensor
    multipliers: Tensor | None = None
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def mapped(self, change: Callable[[Tensor], Any]) -> Quantized:
        """Returns the weight with changed tensors."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})


class Rounding(ABC):
    """Chooses the integers of one matrix, some of its rows at a time and on several threads."""

    chunk: int = CHUNK
    """Best number of weights to round together."""

    @abstractmethod
    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:
        """Rounds rows, float32 (r, K), to integers of a scheme."""


class Peak(Rounding):
    """Scales from the largest values, so that nothing is clipped; values are rounded to nearest."""

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        return scheme.round_rows(weight, search=False)


class Search(Rounding):
    """Scales with the least squared error, weighted by ``importance`` (K,) if given."""

    def __init__(self, importance: Tensor | None = None) -> None:
        self._importance = importance

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        return scheme.round_rows(weight, self._importance)


_SEARCH = Search()


class Scheme(ABC):
    """A weight format: quantizes float weights to integers and dequantizes them."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def traits(self) -> SchemeTraits:
        """Traits of the scheme, as the library has them."""
        return traits_of(op_name(self.name))

    @property
    def span(self) -> int:
        """Columns that share a scale; 0 if a row has one scale."""
        return self.traits.span

    @property
    def lowest(self) -> int:
        """Smallest integer to which a value is rounded."""
        return self.traits.values[0]

    @property
    def highest(self) -> int:
        """Largest integer to which a value is rounded."""
        return self.traits.values[1]

    @property
    def zero_range(self) -> tuple[int, int] | None:
        """Least and largest zero point of schemes with multipliers; None if they have no zero points."""
        return self.traits.zero_points if self.traits.multipliers else None

    @property
    def signed_multipliers(self) -> bool:
        """True if multipliers may be negative."""
        return self.traits.signed_multipliers

    def bits(self, columns: int) -> float:
        """Returns the bits per weight of the packed form, for rows of ``columns`` values."""
        return self.traits.stored_bits(columns)

    @abstractmethod
    def quantize_rows(
        self, weight: Tensor, importance: Tensor | None = None, search: bool = True
    ) -> Quantized:
        """Quantizes float32 rows of shape (r, G, 32); the result's `q` is (r, G·32).

        ``importance`` (G, 32) weights the squared errors.  Without ``search`` the scales come from the
        largest values alone, so that nothing is clipped.
        """

    def dequantize(self, quantized: Quantized) -> Tensor:
        """Returns the float32 matrix (N, K) of the integers."""
        value = quantized.q.float()
        columns = value.shape[1]
        if quantized.zeros is not None:
            value -= self._spread(quantized.zeros, columns, GROUP if self.zero_range else self.span)
        if quantized.multipliers is not None:
            value *= self._spread(quantized.multipliers, columns, GROUP)
        value *= self._spread(quantized.scales, columns, self.span)
        if quantized.offsets is not None:
            value += self._spread(quantized.offsets, columns, self.span)
        return value

    def _spread(self, values: Tensor, columns: int, span: int) -> Tensor:
        """Repeats one value for each ``span`` columns, or for a row if that is 0, for every column."""
        values = values.float()
        return values.repeat_interleave(span, dim=1)[:, :columns] if span else values[:, None]

    def round_rows(self, weight: Tensor, importance: Tensor | None = None, search: bool = True) -> Quantized:
        """Quantizes float32 rows (r, K); K need not be a multiple of 32.  See `quantize_rows`."""
        columns = weight.shape[1]
        groups = math.ceil(columns / GROUP)
        short = (0, groups * GROUP - columns)
        padded = torch.nn.functional.pad(weight, short).view(-1, groups, GROUP)
        if importance is not None:
            importance = torch.nn.functional.pad(importance, short).view(groups, GROUP)
        quantized = self.quantize_rows(padded, importance, search)
        return replace(quantized, q=quantized.q[:, :columns].contiguous())

    def quantize_chunk(self, weight: Tensor, rounding: Rounding) -> tuple[Quantized, float, float]:
        """Quantizes a few rows (r, K) of any float type.

        Returns:
            The integers, Σ(W − Ŵ)² and ΣW².

        Raises:
            ValueError: the weight is not a float matrix or holds a NaN or an infinity.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"{self.name} quantizes float matrices (N, K), "
                f"got {weight.dtype} of shape {tuple(weight.shape)}"
            )
        value = weight.float()
        energy = float(value.square().sum())
        if not math.isfinite(energy) and not bool(value.isfinite().all()):
            raise ValueError("the weight holds a NaN or an infinity: the checkpoint is damaged")
        quantized = rounding.rows(value, self)
        return quantized, float((value - self.dequantize(quantized)).square().sum()), energy

    def quantize(self, weight: Tensor, rounding: Rounding = _SEARCH) -> tuple[Quantized, float]:
        """Quantizes a float matrix (N, K), by default by searching scales.

        Returns:
            The integers, and the relative round-trip error ‖W − Ŵ‖ / ‖W‖.
        """
        return self.quantize_parts(lambda rows: weight[rows], weight.shape, rounding)

    def quantize_parts(
        self, read: Callable[[slice], Tensor], shape: Sequence[int], rounding: Rounding = _SEARCH
    ) -> tuple[Quantized, float]:
        """Quantizes a matrix that is not in memory as a whole; see `quantize`.

        ``read`` returns some of its rows, and is called on several threads.
        """
        chunks = row_chunks(shape[0], shape[1], rounding.chunk)
        parts = each(lambda rows: self.quantize_chunk(read(rows), rounding), chunks)
        quantized = joined([part[0] for part in parts])
        return quantized, relative_error(sum(p[1] for p in parts), sum(p[2] for p in parts))


def op_name(scheme: str) -> str:
    """Returns the ops' name of a scheme."""
    return "i8" if scheme == "int8" else scheme


def joined(parts: Sequence[Quantized], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Quantized:
    """Joins quantized weights tensor by tensor: by default, it concatenates their rows."""
    several = [part.tensors for part in parts]
    tensors: dict[str, Any] = {name: join([one[name] for one in several]) for name in several[0]}
    return replace(parts[0], **tensors)


def row_chunks(rows: int, columns: int, weights: int) -> list[slice]:
    """Returns row ranges of about ``weights`` weights each; all but the last hold whole panels."""
    step = max(1, weights // max(columns, 1) // PANEL) * PANEL
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def relative_error(error: float, energy: float) -> float:
    """Returns ‖W − Ŵ‖ / ‖W‖ from the two sums of squares; 0 for a weight of zeros."""
    return math.sqrt(error / energy) if energy > 0 else 0.0
