"""Integer weights that transformers' weight conversions rearrange like float tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import Quantized, joined, row_chunks
from torch_armllm.quant.schemes.registry import scheme_named

CHUNK = 1 << 20
"""Weights that one thread decodes at a time."""


class IntegerWeight:
    """A matrix of integers (N, K), the matrices of several experts (E, N, K), or a transpose of either.

    `torch.stack`, `torch.cat`, `torch.chunk` and `torch.transpose` rearrange it like the float weight, as
    long as rows stay whole: transformers uses them to merge experts and to concatenate gates and ups.

    Attributes:
        quantized: the integers and scales; with experts, each tensor has a leading expert axis.
        permutation: act-order permutation, int64 (K,) or (E, K): column j of ``quantized`` belongs to input
            ``permutation[j]``; None: the columns have the order of the inputs.
        transposed: the last two axes of the float weight are exchanged.
    """

    def __init__(
        self, quantized: Quantized, permutation: Tensor | None = None, transposed: bool = False
    ) -> None:
        self.quantized = quantized
        self.permutation = permutation
        self.transposed = transposed

    @property
    def scheme(self) -> str:
        """Name of the scheme."""
        return self.quantized.scheme

    @property
    def shape(self) -> torch.Size:
        """The shape of the float weight."""
        *lead, rows, columns = self.quantized.q.shape
        return torch.Size((*lead, columns, rows) if self.transposed else (*lead, rows, columns))

    def dequantize(self) -> Tensor:
        """Returns the weight as float32."""
        if self.quantized.q.dim() > 2:
            return torch.stack([expert.dequantize() for expert in self.unbind()])
        value = scheme_named(self.scheme).dequantize(self.quantized)
        if self.permutation is not None:
            value = torch.empty_like(value).index_copy_(1, self.permutation, value)
        return value.t() if self.transposed else value

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in a float dtype."""
        if len(self.shape) > 2 or self.transposed:
            return self.dequantize().to(dtype)
        return LazyRows(self.shape, lambda rows: self.rows(rows).dequantize()).as_type(dtype)

    def unbind(self) -> list[IntegerWeight]:
        """Returns the experts' matrices."""
        count = self.quantized.q.shape[0]
        orders = [None] * count if self.permutation is None else list(self.permutation)
        return [
            IntegerWeight(self.quantized.mapped(itemgetter(expert)), order, self.transposed)
            for expert, order in enumerate(orders)
        ]

    def rows(self, part: slice | Tensor) -> IntegerWeight:
        """Returns some rows of the integers, which are outputs of the layer."""
        index = (slice(None),) * self._row_axis + (part,)
        chosen = self.quantized.mapped(lambda tensor: tensor[index].contiguous())
        return IntegerWeight(chosen, self.permutation, self.transposed)

    def __getitem__(self, index: Any) -> IntegerWeight:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self

    def to(self, *args: Any, **kwargs: Any) -> IntegerWeight:
        """Returns itself: integers have no other dtype."""
        return self

    def contiguous(self) -> IntegerWeight:
        """Returns itself."""
        return self

    @property
    def _row_axis(self) -> int:
        return self.quantized.q.dim() - 2

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function not in _TORCH_FUNCTIONS:
            raise ValueError(f"integer weights cannot be rearranged by {function.__name__}")
        return _TORCH_FUNCTIONS[function](*args, **(kwargs or {}))


class LazyRows:
    """A float matrix that is decoded a few rows at a time, straight into its final dtype.

    Attributes:
        shape: shape of the matrix.
    """

    def __init__(self, shape: Sequence[int], read: Callable[[slice], Tensor]) -> None:
        self.shape = torch.Size(shape)
        self._read = read

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in a float dtype."""
        matrix = torch.empty(self.shape, dtype=dtype)

        def fill(rows: slice) -> None:
            matrix[rows] = self._read(rows)

        each(fill, row_chunks(self.shape[0], self.shape[1], CHUNK))
        return matrix

    def __getitem__(self, index: Any) -> LazyRows:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyRows:
        """Returns itself: the loader chooses the dtype by `as_type`."""
        return self


class LazyWeight:
    """A weight that is read when transformers indexes it, like a safetensors slice."""

    def __init__(self, read: Callable[[], IntegerWeight | LazyRows | Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> IntegerWeight | LazyRows | Tensor:
        assert index is Ellipsis, "transformers reads a weight as a whole"
        return self._read()


def stacked(weights: Sequence[IntegerWeight], dim: int = 0) -> IntegerWeight:
    """Stacks experts' matrices into one weight."""
    _check_same_kind(weights)
    if dim != 0:
        raise ValueError(f"integer matrices stack along axis 0, not {dim}")
    orders = [weight.permutation for weight in weights]
    permutations = [order for order in orders if order is not None]
    if permutations and len(permutations) < len(orders):
        columns = weights[0].quantized.q.shape[-1]
        permutations = [torch.arange(columns) if order is None else order for order in orders]
    whole = joined([weight.quantized for weight in weights], torch.stack)
    return IntegerWeight(whole, torch.stack(permutations) if permutations else None, weights[0].transposed)


def _cat(weights: Sequence[IntegerWeight], dim: int = 0) -> IntegerWeight:
    _check_same_kind(weights)
    first = weights[0]
    axis = first._row_axis + (1 if first.transposed else 0)
    if dim % len(first.shape) != axis:
        raise ValueError(
            "integer matrices are concatenated along their rows only: groups of columns would be cut"
        )
    for weight in weights[1:]:
        same = weight.permutation is first.permutation or (
            weight.permutation is not None
            and first.permutation is not None
            and torch.equal(weight.permutation, first.permutation)
        )
        if not same:
            raise ValueError(
                "two weights that the model merges have different act-order permutations (desc_act)"
            )
    whole = joined([weight.quantized for weight in weights], lambda parts: torch.cat(parts, first._row_axis))
    return IntegerWeight(whole, first.permutation, first.transposed)


def _transpose(weight: IntegerWeight, dim0: int, dim1: int) -> IntegerWeight:
    axes = len(weight.shape)
    if {dim0 % axes, dim1 % axes} != {axes - 1, axes - 2}:
        raise ValueError(f"axes {dim0} and {dim1} of an integer matrix cannot be exchanged")
    return IntegerWeight(weight.quantized, weight.permutation, not weight.transposed)


def _chunk(weight: IntegerWeight, chunks: int, dim: int = 0) -> list[IntegerWeight]:
    axis = weight._row_axis + (1 if weight.transposed else 0)
    if dim % len(weight.shape) != axis:
        raise ValueError("integer matrices are split between rows only")
    step = -(-weight.shape[axis] // chunks)
    return [weight.rows(slice(start, start + step)) for start in range(0, weight.shape[axis], step)]


_TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: stacked,
    torch.cat: _cat,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
}


def _check_same_kind(weights: Sequence[Any]) -> None:
    kinds = {weight.scheme if isinstance(weight, IntegerWeight) else str(weight.dtype) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights that the model merges have different formats: {', '.join(sorted(kinds))}")
