"""A weight of integers on its way from a file to a layer: it takes part in what rearranges float weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import Quantized, row_chunks
from torch_armllm.quant.schemes.registry import scheme_named

PART = 1 << 20
"""Weights decoded at once by one thread."""


class Integers:
    """Matrices of integers: one (N, K), or experts' (E, N, K), or either of them transposed.

    `torch.stack`, `torch.cat`, `torch.chunk` and `torch.transpose` rearrange it as they would the floats that
    it stands for, as long as rows stay whole: so transformers merges experts and joins gates with ups.

    Attributes:
        quantized: its tensors have a leading axis of experts, where there are several.
        order: int64 (K,) or (E, K): column j of ``quantized`` belongs to input ``order[j]``; None where they
            lie in the inputs' order.
        flipped: the last two axes of the float weight are the other way round.
    """

    def __init__(self, quantized: Quantized, order: Tensor | None = None, flipped: bool = False) -> None:
        self.quantized = quantized
        self.order = order
        self.flipped = flipped

    @property
    def scheme(self) -> str:
        """Name of the scheme."""
        return self.quantized.scheme

    @property
    def shape(self) -> torch.Size:
        """The float weight's."""
        *lead, rows, columns = self.quantized.q.shape
        return torch.Size((*lead, columns, rows) if self.flipped else (*lead, rows, columns))

    def dequantize(self) -> Tensor:
        """The float32 weight that the integers stand for."""
        if self.quantized.q.dim() > 2:
            return torch.stack([expert.dequantize() for expert in self.unbind()])
        value = scheme_named(self.scheme).dequantize(self.quantized)
        if self.order is not None:
            value = torch.empty_like(value).index_copy_(1, self.order, value)
        return value.t() if self.flipped else value

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """The weight that the integers stand for, of a float type."""
        if len(self.shape) > 2 or self.flipped:
            return self.dequantize().to(dtype)
        return Rows(self.shape, lambda rows: self.rows(rows).dequantize()).as_type(dtype)

    def unbind(self) -> list[Integers]:
        """The experts' matrices, one by one."""
        parts = {name: part.unbind() for name, part in _tensors(self.quantized).items()}
        count = self.quantized.q.shape[0]
        orders = [None] * count if self.order is None else list(self.order)
        own = [_with(self.quantized, {name: part[e] for name, part in parts.items()}) for e in range(count)]
        return [Integers(one, order, self.flipped) for one, order in zip(own, orders, strict=True)]

    def rows(self, part: slice | Tensor) -> Integers:
        """Some of the rows of the integers: outputs of the layer."""
        index = (slice(None),) * self._row_axis + (part,)
        chosen = {name: tensor[index].contiguous() for name, tensor in _tensors(self.quantized).items()}
        return Integers(_with(self.quantized, chosen), self.order, self.flipped)

    def __getitem__(self, index: Any) -> Integers:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self

    def to(self, *args: Any, **kwargs: Any) -> Integers:
        """Itself: integers have no other dtype."""
        return self

    def contiguous(self) -> Integers:
        """Itself."""
        return self

    @property
    def _row_axis(self) -> int:
        return self.quantized.q.dim() - 2

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function not in _ARRANGED:
            raise ValueError(f"weights that are integers cannot be rearranged by {function.__name__}")
        return _ARRANGED[function](*args, **(kwargs or {}))


class Rows:
    """A float matrix that is decoded a few rows at a time, into whatever takes it.

    Attributes:
        shape: of the matrix.
    """

    def __init__(self, shape: Sequence[int], read: Callable[[slice], Tensor]) -> None:
        self.shape = torch.Size(shape)
        self._read = read

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """The matrix, of a float type."""
        found = torch.empty(self.shape, dtype=dtype)

        def fill(rows: slice) -> None:
            found[rows] = self._read(rows)

        each(fill, row_chunks(self.shape[0], self.shape[1], PART))
        return found

    def __getitem__(self, index: Any) -> Rows:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self

    def to(self, *args: Any, **kwargs: Any) -> Rows:
        """Itself: what takes it says of which type it is to be."""
        return self


class Lazy:
    """A weight that is read when transformers asks for it, as a safetensors slice is."""

    def __init__(self, read: Callable[[], Integers | Rows | Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Integers | Rows | Tensor:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self._read()


def stacked(matrices: Sequence[Integers]) -> Integers:
    """Experts' matrices as one weight."""
    return _stack(matrices)


def _stack(weights: Sequence[Integers], dim: int = 0) -> Integers:
    _alike(weights)
    if dim != 0:
        raise ValueError(f"matrices of integers stack along axis 0, not {dim}")
    orders = [weight.order for weight in weights]
    given = [order for order in orders if order is not None]
    if given and len(given) < len(orders):
        columns = weights[0].quantized.q.shape[-1]
        given = [torch.arange(columns) if order is None else order for order in orders]
    joined = _each([weight.quantized for weight in weights], torch.stack)
    return Integers(joined, torch.stack(given) if given else None, weights[0].flipped)


def _cat(weights: Sequence[Integers], dim: int = 0) -> Integers:
    _alike(weights)
    first = weights[0]
    axis = first._row_axis + (1 if first.flipped else 0)
    if dim % len(first.shape) != axis:
        raise ValueError("matrices of integers join along their rows only: groups of columns would be cut")
    for weight in weights[1:]:
        same = weight.order is first.order or (
            weight.order is not None and first.order is not None and torch.equal(weight.order, first.order)
        )
        if not same:
            raise ValueError("two weights that are one in the model are ordered differently (desc_act)")
    joined = _each([weight.quantized for weight in weights], lambda parts: torch.cat(parts, first._row_axis))
    return Integers(joined, first.order, first.flipped)


def _transpose(weight: Integers, dim0: int, dim1: int) -> Integers:
    axes = len(weight.shape)
    if {dim0 % axes, dim1 % axes} != {axes - 1, axes - 2}:
        raise ValueError(f"axes {dim0} and {dim1} of a matrix of integers cannot be exchanged")
    return Integers(weight.quantized, weight.order, not weight.flipped)


def _chunk(weight: Integers, chunks: int, dim: int = 0) -> list[Integers]:
    axis = weight._row_axis + (1 if weight.flipped else 0)
    if dim % len(weight.shape) != axis:
        raise ValueError("matrices of integers are cut between their rows only")
    step = -(-weight.shape[axis] // chunks)
    return [weight.rows(slice(start, start + step)) for start in range(0, weight.shape[axis], step)]


_ARRANGED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
}


def _alike(weights: Sequence[Any]) -> None:
    kinds = {weight.scheme if isinstance(weight, Integers) else str(weight.dtype) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights that are one in the model are stored apart: {', '.join(sorted(kinds))}")


def _each(several: Sequence[Quantized], join: Callable[[list[Tensor]], Tensor]) -> Quantized:
    """One quantized weight of several, part by part."""
    parts = [_tensors(one) for one in several]
    return _with(several[0], {name: join([part[name] for part in parts]) for name in parts[0]})


def _tensors(quantized: Quantized) -> dict[str, Tensor]:
    values = {field.name: getattr(quantized, field.name) for field in fields(quantized)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _with(quantized: Quantized, tensors: dict[str, Any]) -> Quantized:
    return replace(quantized, **tensors)
