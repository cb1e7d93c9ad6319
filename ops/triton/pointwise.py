"""Elementwise programs: chains of operators in one kernel, as instruction ``pointwise`` of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_armllm.ops.tables import ENUMS
from torch_armllm.ops.triton.functions import at_most, expm1, gelu, log1p, sigmoid, silu, softplus
from torch_armllm.ops.triton.rows import block_of, rounded

__all__ = ["Step", "pointwise"]

_MOST_COLUMNS = 1024
_MOST_DIMENSIONS = 3


class Step(NamedTuple):
    """An operator of earlier values: operands come first, then earlier steps, in order."""

    op: str
    """Name of a ``PointwiseOp``; ``select`` is ``a > 0 ? b : c``."""
    a: int = 0
    b: int = 0
    c: int = 0
    number: float = 0.0
    """Value of the operator ``number``, which reads nothing."""


@triton.jit
def computed(op: tl.constexpr, a: tl.tensor, b: tl.tensor, c: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """Computes one operator."""
    if op == "number":
        v = tl.full(a.shape, number, tl.float32)
    elif op == "add":
        v = a + b
    elif op == "subtract":
        v = a - b
    elif op == "multiply":
        v = a * b
    elif op == "divide":
        v = a / b
    elif op == "maximum":
        v = tl.where(b != b, b, -at_most(-a, -b))
    elif op == "minimum":
        v = tl.where(b != b, b, at_most(a, b))
    elif op == "negate":
        v = -a
    elif op == "absolute":
        v = tl.abs(a)
    elif op == "exp":
        v = tl.exp(a)
    elif op == "log":
        v = tl.log(a)
    elif op == "sqrt":
        v = tl.sqrt(a)
    elif op == "sigmoid":
        v = sigmoid(a)
    elif op == "silu":
        v = silu(a)
    elif op == "gelu":
        v = gelu(a)
    elif op == "tanh":
        v = 2.0 * sigmoid(2.0 * a) - 1.0
    elif op == "softplus":
        v = softplus(a)
    elif op == "greater":
        v = tl.where(a > b, 1.0, 0.0)
    elif op == "select":
        v = tl.where(a > 0.0, b, c)
    elif op == "expm1":
        v = expm1(a)
    elif op == "log1p":
        v = log1p(a)
    else:
        tl.static_assert(op == "floor", "an operator without a kernel")
        v = tl.floor(a)
    return v


@triton.jit
def pointwise_kernel(
    operands: tl.tensor,
    strides: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    n: tl.tensor,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes some columns of a head: all steps of the program, in order."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    values: tl.tuple = ()
    for k in tl.static_range(len(operands)):
        place = token * strides[k][0] + head * strides[k][1] + i * strides[k][2]
        values = values + (tl.load(operands[k] + place, mask=i < n, other=0.0).to(tl.float32),)
    for k in tl.static_range(len(STEPS)):
        a, b, c = values[STEPS[k][1]], values[STEPS[k][2]], values[STEPS[k][3]]
        values = values + (computed(STEPS[k][0], a, b, c, STEPS[k][4]),)
    last = rounded(values[len(operands) + len(STEPS) - 1], out.dtype.element_ty)
    tl.store(out + (token * heads + head) * n + i, last, mask=i < n)


def pointwise(operands: Sequence[Tensor], steps: Sequence[Step], dtype: torch.dtype) -> Tensor:
    """Runs an elementwise program; all values are float32, and the result is rounded once.

    Args:
        operands: at least one, in float32, bfloat16, float16 or int64; their shapes broadcast to at most
            ``(tokens, heads, width)``.
        steps: the operators, in order.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        The last step's value, contiguous.

    Raises:
        ValueError: there is no operand or no step, an operator is unknown, a step reads a value that no
            earlier one computes, or the operands have more than three dimensions.
    """
    if not operands or not steps:
        raise ValueError("an elementwise program needs an operand and a step")
    for number, step in enumerate(steps, len(operands)):
        if step.op not in ENUMS["PointwiseOp"]:
            raise ValueError(f"unknown operator {step.op!r}; choose from: {', '.join(ENUMS['PointwiseOp'])}")
        if not all(0 <= value < number for value in (step.a, step.b, step.c)):
            raise ValueError(f"value {number} reads {step}, but only values 0 to {number - 1} precede it")
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"operands broadcast to {tuple(shape)}; programs have at most three dimensions")
    out = operands[0].new_empty(shape, dtype=dtype)
    if out.numel() > 0:
        full = (1,) * (_MOST_DIMENSIONS - len(shape)) + tuple(shape)
        views = [x.expand(full) for x in operands]
        tokens, heads, width = full
        block = block_of(width, _MOST_COLUMNS)
        pointwise_kernel[(tokens, heads, triton.cdiv(width, block))](
            tuple(views),
            tuple(x.stride() for x in views),
            out,
            heads,
            width,
            STEPS=tuple((tl.constexpr(op), *values) for op, *values in steps),
            BLOCK=block,
        )
    return out
