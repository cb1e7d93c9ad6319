"""Sums, means and deviations over a token's dimensions, and products of small matrices of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, constant, is_op, only_user
from torch_armllm.plan.expression import Expression, apply, count_values, number
from torch_armllm.plan.lowering import FLOATS, Lowering, Unlowerable, Writer
from torch_armllm.plan.program import Operand

_SHAPES_AND_TYPES = (
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.to.dtype,
    aten._to_copy.default,
)
MOST_TERMS = 8
"""Terms that a program adds; longer sums are products with a row of ones."""
_MOST_JOINED = 16
"""Values of a program that computes the terms of a sum and adds them."""


def _dims(low: Lowering, node: Node, source: Node, given: Any) -> list[int]:
    """Returns the reduced dimensions of a token."""
    val = source.meta["val"]
    dims = [low.inner_dim(val, d) for d in ([given] if isinstance(given, int) else given or range(val.dim()))]
    if any(d is None for d in dims):
        raise Unlowerable("sums over the tokens of a step, which are of many sequences")
    return [d for d in dims if d is not None]


def _terms(rows: Operand, d: int, index: int) -> Operand:
    """Returns one entry of a dimension, which stays with a size of 1."""
    inner = (*rows.inner[:d], 1, *rows.inner[d + 1 :])
    return rows.view(inner, rows.steps, index * rows.steps[d])


def _weighted_sum(low: Lowering, rows: Operand, d: int, factor: float, dtype: torch.dtype) -> Operand:
    """Returns ``factor`` times the sum over a dimension, which stays with a size of 1."""
    size = rows.inner[d]
    inner = (*rows.inner[:d], 1, *rows.inner[d + 1 :])
    if size <= MOST_TERMS:
        parts = [_terms(rows, d, i) for i in range(size)]
        total = _leaf(parts[0])
        for part in parts[1:]:
            total = apply("add", dtype, total, _leaf(part))
        return low.compute(_scaled(replace(total, dtype=dtype), factor))
    if d != len(rows.inner) - 1:
        raise Unlowerable(f"sums {size} entries of another dimension than the last")
    if rows.strides and rows.strides[-1] != 1:
        rows = low.compute(_leaf(rows))
    weight = low.program.constant(torch.full((1, size), factor))
    out = low.program.allocate(math.prod(inner), dtype, inner)
    flat = [(0, 0)]
    for n, step, to in zip(rows.inner[:-1], rows.steps[:-1], out.steps[:-1], strict=True):
        flat = [(x + i * step, y + i * to) for x, y in flat for i in range(n)]
    for column, place in flat:
        low.emit(
            "dense_linear",
            x=rows.view((size,), (1,), column),
            out=out.view((1,), (1,), place),
            weight=weight,
            bias=low.weight(None),
            in_features=size,
            out_features=1,
        )
    return out


def _scaled(total: Expression, factor: float) -> Expression:
    return total if factor == 1.0 else apply("multiply", total.dtype, total, number(factor))


def _joined(
    low: Lowering, node: Node, source: Node, dims: Sequence[int], factor: float
) -> Expression | Operand | None:
    """Adds the few entries of an expression without storing them; None if they are too many."""
    pending = low.locations.get(source)
    if not isinstance(pending, Expression) or len(dims) != 1:
        return None
    size, parts = pending.inner[dims[0]], count_values(pending)
    if size * (parts + 1) > _MOST_JOINED:
        return None
    value, inner = low.expression(source), low.inner_sizes(node.meta["val"])
    keep = len(inner) == len(value.inner)
    total = value.entries(dims[0], 0, keep)
    for index in range(1, size):
        total = apply("add", total.dtype, total, value.entries(dims[0], index, keep))
    total = _scaled(replace(total, dtype=node.meta["val"].dtype), factor)
    return total if is_op(only_user(node), *CONVERSIONS) and total.inner == inner else low.compute(total)


def _reduced(low: Lowering, rows: Operand, dims: Sequence[int], factor: float, dtype: torch.dtype) -> Operand:
    """Returns ``factor`` times a sum, in float32 until it is stored."""
    for d in dims[1:]:
        rows = _weighted_sum(low, rows, d, 1.0, torch.float32)
    return _weighted_sum(low, rows, dims[0], factor, dtype)


def _floats(low: Lowering, node: Node, source: Node) -> tuple[Operand, torch.dtype]:
    """Returns the location of a tensor of floats, and the type of what it is reduced to."""
    rows, dtype = low.place(source), node.meta["val"].dtype
    if dtype not in FLOATS or rows.dtype not in FLOATS:
        raise Unlowerable(f"sums {rows.dtype}, and plans sum floats")
    return rows, dtype


def _leaf(operand: Operand) -> Expression:
    return Expression(operand.inner, operand.dtype, operand=operand)


def _total(low: Lowering, node: Node, source: Node, dims: Sequence[int], factor: float) -> Any:
    """Returns ``factor`` times the sum over some dimensions."""
    if source.meta["val"].dtype in FLOATS and node.meta["val"].dtype in FLOATS:
        joined = _joined(low, node, source, dims, factor)
        if joined is not None:
            return joined
    rows, dtype = _floats(low, node, source)
    return _reduced(low, rows, dims, factor, dtype)


def _mean(low: Lowering, node: Node, source: Node, dims: Any = None, *_: Any, **__: Any) -> Any:
    which = _dims(low, node, source, dims)
    inner = low.inner_sizes(source.meta["val"])
    factor = 1 / math.prod(inner[d] for d in which)
    return low.sized(node, _total(low, node, source, which, factor))


def _sum(low: Lowering, node: Node, source: Node, dims: Any = None, *_: Any, **__: Any) -> Any:
    return low.sized(node, _total(low, node, source, _dims(low, node, source, dims), 1.0))


def _deviation(
    low: Lowering, node: Node, source: Node, dims: Any = None, unbiased: bool = True, *_: Any
) -> Any:
    """The root of the mean square of the distance from the mean."""
    (rows, dtype), which = _floats(low, node, source), _dims(low, node, source, dims)
    count = math.prod(rows.inner[d] for d in which)
    mean = _reduced(low, rows, which, 1 / count, torch.float32)
    distance = apply("subtract", torch.float32, _leaf(rows), _leaf(mean))
    squares = low.compute(apply("multiply", torch.float32, distance, distance))
    total = _reduced(low, squares, which, 1 / (count - 1 if unbiased else count), torch.float32)
    return low.sized(node, low.compute(apply("sqrt", dtype, _leaf(total))))


def _vector_norm(
    low: Lowering, node: Node, source: Node, order: float = 2, dims: Any = None, *_: Any, **__: Any
) -> Any:
    """The root of the sum of squares."""
    if order != 2:
        raise Unlowerable(f"computes a norm of order {order}; plans have the Euclidean norm")
    (rows, dtype), which = _floats(low, node, source), _dims(low, node, source, dims)
    squares = low.compute(apply("multiply", torch.float32, _leaf(rows), _leaf(rows)))
    total = _reduced(low, squares, which, 1.0, torch.float32)
    return low.sized(node, low.compute(apply("sqrt", dtype, _leaf(total))))


def _shares(low: Lowering, rows: Operand, d: int, dtype: torch.dtype) -> Operand:
    """Returns the softmax over a dimension of few entries."""
    if rows.inner[d] > MOST_TERMS:
        raise Unlowerable(f"computes a softmax over {rows.inner[d]} entries; plans have up to {MOST_TERMS}")
    first, *others = (_leaf(_terms(rows, d, i)) for i in range(rows.inner[d]))
    for other in others:
        first = apply("maximum", torch.float32, first, other)
    weights = low.compute(apply("exp", torch.float32, apply("subtract", torch.float32, _leaf(rows), first)))
    total = _weighted_sum(low, weights, d, 1.0, torch.float32)
    return low.compute(apply("divide", dtype, _leaf(weights), _leaf(total)))


def _softmax(low: Lowering, node: Node, source: Node, dim: int, *_: Any) -> Any:
    (rows, dtype), (d,) = _floats(low, node, source), _dims(low, node, source, dim)
    return low.sized(node, _shares(low, rows, d, dtype))


def _attention_within(
    low: Lowering,
    node: Node,
    query: Node,
    key: Node,
    value: Node,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    **__: Any,
) -> Operand:
    """Attends to few rows of the same token, by queries that all tokens share (Inkling 2)."""
    queries = _shared_queries(low, query)
    if queries is None or mask is not None or causal:
        raise Unlowerable("attends to something else than tokens in the cache")
    keys, _ = _floats(low, node, key)
    values, dtype = _floats(low, node, value)
    if len(keys.inner) != 2 or len(values.inner) != 2:
        raise Unlowerable("attends to more than one list of rows of each token")
    size = keys.inner[1]
    out = low.new(node)
    for i, tensor in enumerate(queries):
        held = low.program.constant(tensor.contiguous())
        row = Operand(held.space, held.index, held.dtype, (size,))
        products = low.compute(apply("multiply", torch.float32, _leaf(keys), _leaf(row)))
        scores = _weighted_sum(low, products, 1, size**-0.5 if scale is None else scale, torch.float32)
        weights = _shares(low, scores, 0, torch.float32)
        weighted = low.compute(apply("multiply", torch.float32, _leaf(values), _leaf(weights)))
        first, *others = (_leaf(_terms(weighted, 0, j)) for j in range(values.inner[0]))
        for other in others:
            first = apply("add", dtype, first, other)
        low.compute(first, out.view((1, out.inner[1]), out.steps, i * out.steps[0]))
    return out


def _shared_queries(low: Lowering, query: Any) -> torch.Tensor | None:
    """Returns queries that are the same for all tokens, float32 ``(queries, size)``; None if they are not."""
    while isinstance(query, Node) and query.op == "call_function":
        if query.target not in _SHAPES_AND_TYPES:
            return None
        query = OpCall(query).first
    tensor = constant(low.module, query)
    return None if tensor is None else tensor.detach().float().view(-1, tensor.shape[-1])


def _matmul(low: Lowering, node: Node, left: Any, right: Any) -> Expression:
    """Multiplies small matrices of each token, as a sum of products of columns and rows."""
    for source in (left, right):
        if not isinstance(low.locations.get(source), Operand | Expression):
            raise Unlowerable("multiplies by a constant matrix in another way than a linear layer")
    a, b = low.place(left), low.place(right)
    size = a.inner[-1] if a.inner else 0
    if len(a.inner) < 2 or len(b.inner) < 2 or not 0 < size <= MOST_TERMS or b.inner[-2] != size:
        raise Unlowerable(f"multiplies matrices of sizes {a.inner} and {b.inner} for each token")
    total: Expression | None = None
    for i in range(size):
        column, row = _terms(a, len(a.inner) - 1, i), _terms(b, len(b.inner) - 2, i)
        product = apply("multiply", node.meta["val"].dtype, _leaf(column), _leaf(row))
        total = product if total is None else apply("add", product.dtype, total, product)
    assert total is not None
    return total


WRITERS: dict[Any, Writer] = {
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.std.dim: _deviation,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.softmax.int: _softmax,
    aten.scaled_dot_product_attention.default: _attention_within,
    aten.matmul.default: _matmul,
}
