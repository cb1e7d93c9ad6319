"""Elementwise expressions: values that no instruction has computed yet, and the program that computes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from torch_armllm.plan.program import Field, Operand

MOST_VALUES = 24
"""Operands and steps of an elementwise program, as in ``ops/pointwise/pointwise.h``."""


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
    own = (1,) * (len(inner) - len(operand.inner)) + operand.inner
    strides: list[int] = []
    step = 1
    for size in reversed(own):
        strides.append(step)
        step *= size
    strides.reverse()
    if operand.strided_heads and len(strides) > 1:
        strides[-2] = operand.strided_heads
    return [0 if size == 1 else stride for size, stride in zip(own, strides, strict=True)]


def _two_dimensions(
    inner: tuple[int, ...], strides: list[list[int]]
) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Merges dimensions that all operands run through evenly; returns heads and width, and their strides."""
    kept = [d for d, size in enumerate(inner) if size != 1]
    groups: list[list[int]] = [[d] for d in kept[:1]]
    for before, after in pairwise(kept):
        if all(row[before] == row[after] * inner[after] for row in strides):
            groups[-1].append(after)
        else:
            groups.append([after])
    if len(groups) > 2:
        raise Unmappable(f"its operands of sizes {inner} are repeated in too many dimensions")
    sizes = [1] * (2 - len(groups))
    steps = [[0] * (2 - len(groups)) for _ in strides]
    for group in groups:
        size = 1
        for d in group:
            size *= inner[d]
        sizes.append(size)
        for merged, row in zip(steps, strides, strict=True):
            merged.append(row[group[-1]])
    if any(column not in (0, 1) for _, column in steps):
        raise Unmappable("the last dimension of an operand is not contiguous")
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
        raise Unmappable(f"it has more than {MOST_VALUES} operands and operators")
    operands = [leaf.operand for leaf in leaves if leaf.operand is not None]
    strides = [_strides(operand, expression.inner) for operand in operands]
    strides.insert(0, _strides(out, expression.inner))
    (heads, width), merged = _two_dimensions(expression.inner, strides)
    (out_heads, _), *by_operand = merged
    place = {id(value): index for index, value in enumerate([*leaves, *steps])}
    return {
        "out": out,
        "out_head_stride": out_heads,
        "heads": heads,
        "width": width,
        "operands": [
            {
                "x": operand,
                "head_stride": head,
                "by_token": operand.space != "constant",
                "by_column": column == 1 and width > 1,
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
