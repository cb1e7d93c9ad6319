"""Elementwise expressions: values that no instruction has computed yet, and the program that computes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from torch_armllm.plan.program import Field, Operand

MOST_VALUES = 24
"""Operands and steps of an elementwise program, as in ``ops/pointwise/pointwise.h``."""
MOST_PARTS = 256
"""Instructions of an expression that is repeated in many dimensions."""


@dataclass(frozen=True, eq=False)
class Expression:
    """An operand, or an operator of other expressions.

    Attributes:
        inner: sizes of a token's elements; operands of smaller sizes are repeated, as torch broadcasts.
        dtype: of the value in the graph; expressions compute in float32.
        op: name of a ``PointwiseOp``; empty for an operand.
        inputs: arguments of the operator.
        number: value of the operator ``number``.
        operand: rows of tokens, or a constant.
    """

    inner: tuple[int, ...]
    dtype: torch.dtype
    op: str = ""
    inputs: tuple[Expression, ...] = ()
    number: float = 0.0
    operand: Operand | None = None

    def permuted(self, order: Sequence[int]) -> Expression:
        """Returns the expression with its dimensions in another order."""
        return self._mapped(lambda leaf: _reordered(leaf, self.inner, order), {})

    def entry(self, index: int) -> Expression:
        """Returns the expression for one entry of its first dimension."""
        return self._mapped(lambda leaf: _entry(leaf, len(self.inner), index), {})

    def entries(self, dim: int, index: int, keep: bool) -> Expression:
        """Returns the expression for one entry of a dimension, which may stay with a size of 1."""
        return self._mapped(lambda leaf: _entries(leaf, dim - len(self.inner), index, keep), {})

    def _mapped(self, change: Callable[[Operand], Operand], known: dict[int, Expression]) -> Expression:
        """Returns the expression of changed operands."""
        if id(self) not in known:
            if self.operand is not None:
                operand = change(self.operand)
                result = replace(self, inner=operand.inner, operand=operand)
            else:
                inputs = tuple(x._mapped(change, known) for x in self.inputs)
                inner = _broadcast([x.inner for x in inputs])
                result = replace(self, inner=inner, inputs=inputs)
            known[id(self)] = result
        return known[id(self)]


def _full(operand: Operand, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns sizes and strides of an operand with dimensions of size 1 in front."""
    added = (1,) * (dims - len(operand.inner))
    return added + operand.inner, (0,) * len(added) + operand.steps


def _reordered(operand: Operand, inner: tuple[int, ...], order: Sequence[int]) -> Operand:
    sizes, steps = _full(operand, len(inner))
    return operand.view(tuple(sizes[d] for d in order), tuple(steps[d] for d in order))


def _entry(operand: Operand, dims: int, index: int) -> Operand:
    """Returns an operand for one entry of the first of ``dims`` dimensions, which it may repeat."""
    if len(operand.inner) < dims:
        return operand
    column = 0 if operand.inner[0] == 1 else index * operand.steps[0]
    return operand.view(operand.inner[1:], operand.steps[1:], column)


def _entries(operand: Operand, dim: int, index: int, keep: bool) -> Operand:
    """Returns one entry of a dimension, counted from the last, of an operand that may repeat it."""
    if -dim > len(operand.inner):
        return operand
    at = len(operand.inner) + dim
    column = 0 if operand.inner[at] == 1 else index * operand.steps[at]
    kept = (1,) if keep else ()
    inner = operand.inner[:at] + kept + operand.inner[at + 1 :]
    steps = operand.steps[:at] + kept + operand.steps[at + 1 :]
    return operand.view(inner, steps, column)


def viewed(inner: tuple[int, ...], steps: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the strides of the same elements in order with other sizes; None if a copy is needed."""
    kept = [(n, step) for n, step in zip(inner, steps, strict=True) if n != 1]
    merged: list[tuple[int, int]] = []
    for n, step in kept:
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    found: list[int] = []
    room, step = merged.pop() if merged else (1, 1)
    for size in reversed(sizes):
        if room == 1 and size != 1 and merged:
            room, step = merged.pop()
        if room % size:
            return None
        found.append(step)
        room, step = room // size, step * size
    return None if merged or room != 1 else tuple(reversed(found))


def number(value: float) -> Expression:
    """Returns a number as an expression."""
    return Expression((), torch.float32, "number", number=value)


class Unmappable(ValueError):
    """An expression is too large for one program, or repeats its operands in too many dimensions."""


def _broadcast(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    shape = torch.broadcast_shapes(*sizes)
    return tuple(shape)


def apply(op: str, dtype: torch.dtype, *inputs: Expression) -> Expression:
    """Returns an operator of expressions."""
    return Expression(_broadcast([x.inner for x in inputs]), dtype, op, inputs)


def _strides(operand: Operand, inner: tuple[int, ...]) -> list[int]:
    """Returns the elements from one entry to the next of each dimension of ``inner``; 0 repeats."""
    sizes, steps = _full(operand, len(inner))
    return [0 if size == 1 else step for size, step in zip(sizes, steps, strict=True)]


def operands_of(expression: Expression) -> list[Operand]:
    """Returns the operands of an expression, each once."""
    leaves: list[Expression] = []
    _collect(expression, leaves, [])
    return [leaf.operand for leaf in leaves if leaf.operand is not None]


def count_values(expression: Expression) -> int:
    """Returns the number of operands and operators of an expression."""
    leaves: list[Expression] = []
    steps: list[Expression] = []
    _collect(expression, leaves, steps)
    return len(leaves) + len(steps)


def parts_of(expression: Expression, out: Operand) -> Iterator[tuple[Expression, Operand]]:
    """Yields the parts of an expression that one instruction each computes, and where to.

    Raises:
        Unmappable: there are too many.
    """
    inner = expression.inner
    strides = [_strides(operand, inner) for operand in (out, *operands_of(expression))]
    groups = _groups(inner, strides)
    if len(groups) <= 2:
        yield expression, out
        return
    if inner[0] > MOST_PARTS:
        raise Unmappable(f"repeats operands of sizes {inner} in too many dimensions")
    for i in range(inner[0]):
        yield from parts_of(expression.entry(i), _entry(out, len(inner), i))


def _groups(inner: tuple[int, ...], strides: list[list[int]]) -> list[list[int]]:
    """Merges dimensions that all operands run through evenly; returns the dimensions of each group."""
    kept = [d for d, size in enumerate(inner) if size != 1]
    groups: list[list[int]] = [[d] for d in kept[:1]]
    for before, after in pairwise(kept):
        if all(row[before] == row[after] * inner[after] for row in strides):
            groups[-1].append(after)
        else:
            groups.append([after])
    return groups


def _two_dimensions(
    inner: tuple[int, ...], strides: list[list[int]]
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Returns heads and width of elements, and each operand's strides of them."""
    groups = _groups(inner, strides)
    columns = groups.pop() if groups else []
    heads = groups.pop() if groups else []
    assert not groups, "an expression of several parts"
    sizes = [math.prod(inner[d] for d in group) for group in (heads, columns)]
    steps = [tuple(row[group[-1]] if group else 0 for group in (heads, columns)) for row in strides]
    return (sizes[0], sizes[1]), [(head, column) for head, column in steps]


def pointwise_fields(expression: Expression, out: Operand) -> dict[str, Field]:
    """Returns the fields of the instruction that writes an expression.

    Args:
        expression: to compute.
        out: where to, rows of the same sizes.

    Raises:
        Unmappable: one instruction cannot compute it.
    """
    leaves: list[Expression] = []
    steps: list[Expression] = []
    _collect(expression, leaves, steps)
    if len(leaves) + len(steps) > MOST_VALUES:
        raise Unmappable(f"has a formula of more than {MOST_VALUES} operands and operators")
    operands = [leaf.operand for leaf in leaves if leaf.operand is not None]
    strides = [_strides(operand, expression.inner) for operand in operands]
    strides.insert(0, _strides(out, expression.inner))
    (heads, width), merged = _two_dimensions(expression.inner, strides)
    (out_heads, out_columns), *by_operand = merged
    place = {id(value): index for index, value in enumerate([*leaves, *steps])}
    return {
        "out": out,
        "out_head_stride": out_heads,
        "out_column_stride": out_columns if width > 1 else 1,
        "heads": heads,
        "width": width,
        "operands": [
            {
                "x": operand,
                "head_stride": head,
                "by_token": operand.space != "constant",
                "column_stride": column if width > 1 else 0,
            }
            for operand, (head, column) in zip(operands, by_operand, strict=True)
        ],
        "steps": [
            {
                "op": step.op,
                "number": step.number,
                **dict(zip("abc", [*(place[id(x)] for x in step.inputs), 0, 0, 0][:3], strict=True)),
            }
            for step in steps
        ],
    }


def _collect(expression: Expression, leaves: list[Expression], steps: list[Expression]) -> None:
    """Appends each operand and operator of an expression once, arguments first."""
    if any(expression is known for known in (*leaves, *steps)):
        return
    for argument in expression.inputs:
        _collect(argument, leaves, steps)
    (leaves if expression.operand is not None else steps).append(expression)
