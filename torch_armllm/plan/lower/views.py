"""Views and slices of rows: they need no instruction, only another operand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten, constant
from torch_armllm.plan.expression import Expression, number
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand, contiguous


def _view(low: Lowering, node: Node, source: Any, *_: Any) -> Operand:
    return NOTHING if is_empty(node) else low.same_rows(node, source)


def is_empty(node: Any) -> bool:
    """True if a result has no elements, as the rotated part of keys without positions."""
    return isinstance(node, Node) and 0 in node.meta["val"].shape


def _inner_dim(low: Lowering, val: Tensor, dim: int) -> int:
    found = low.inner_dim(val, dim)
    if found is None:
        raise Unlowerable("picks tokens out of a step, which other sequences share")
    return found


def _select(low: Lowering, node: Node, source: Any, dim: int, index: int) -> Any:
    if is_empty(node):
        return NOTHING
    layer = low.cache_layer(source, index) if dim == 0 else None
    if layer is not None:
        return layer
    val = source.meta["val"]
    if dim == 0 and index == 0 and val.shape[0] == 1 and low.inner_dim(val, dim) is None:
        return low.same_rows(node, source)
    rows, d = low.place(source), _inner_dim(low, val, dim)
    inner, steps = rows.inner, rows.steps
    column = index % inner[d] * steps[d]
    return low.sized(node, rows.view(inner[:d] + inner[d + 1 :], steps[:d] + steps[d + 1 :], column))


def _slice(
    low: Lowering, node: Node, source: Any, dim: int = 0, begin: Any = 0, end: Any = None, step: int = 1
) -> Operand:
    if is_empty(node):
        return NOTHING
    rows, d = low.place(source), _inner_dim(low, source.meta["val"], dim)
    begin = max(int(begin or 0) + (rows.inner[d] if (begin or 0) < 0 else 0), 0)
    steps = (*rows.steps[:d], rows.steps[d] * step, *rows.steps[d + 1 :])
    return rows.view(low.inner_sizes(node.meta["val"]), steps, begin * rows.steps[d])


def _getitem(low: Lowering, node: Node, source: Node, index: int) -> Any:
    return low.locations[source][index]


def _split(low: Lowering, node: Node, source: Any, size: Any, dim: int = 0) -> tuple[Operand, ...]:
    """Splits one of a token's dimensions into adjacent parts."""
    rows, d = low.place(source), _inner_dim(low, source.meta["val"], dim)
    parts = [low.inner_sizes(part) for part in node.meta["val"]]
    begins = accumulate((inner[d] for inner in parts), initial=0)
    return tuple(
        rows.view(inner, rows.steps, begin * rows.steps[d])
        for inner, begin in zip(parts, begins, strict=False)
    )


def _unbind(low: Lowering, node: Node, source: Any, dim: int = 0) -> tuple[Operand, ...]:
    """Splits one of a token's dimensions into its entries."""
    rows, d = low.place(source), _inner_dim(low, source.meta["val"], dim)
    inner, steps = rows.inner[:d] + rows.inner[d + 1 :], rows.steps[:d] + rows.steps[d + 1 :]
    return tuple(rows.view(inner, steps, i * rows.steps[d]) for i in range(rows.inner[d]))


def _transpose(low: Lowering, node: Node, source: Any, first: int, second: int) -> Any:
    dims = list(range(source.meta["val"].dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(low, node, source, dims)


def _permute(low: Lowering, node: Node, source: Any, dims: Sequence[int]) -> Any:
    """Reorders a token's dimensions; the token dimension itself, which rows do not have, moves freely."""
    if is_empty(node):
        return NOTHING
    val = source.meta["val"]
    found = [low.inner_dim(val, d) for d in dims]
    order = [d for d in found if d is not None]
    location = low.locations.get(source)
    if isinstance(location, Expression):
        permuted = location.permuted(order)
        if permuted.inner == low.inner_sizes(node.meta["val"]):
            low.read(source)
            return permuted
    rows = low.place(source)
    reordered = rows.view(tuple(rows.inner[d] for d in order), tuple(rows.steps[d] for d in order))
    return low.sized(node, reordered)


def _expand(low: Lowering, node: Node, source: Any, *_: Any) -> Any:
    """Repeats entries: they have a stride of 0."""
    shared = None if constant(low.module, source) is None else low.expression(source)
    rows = low.place(source) if shared is None else shared.operand
    inner = low.inner_sizes(node.meta["val"])
    assert rows is not None, "a constant is an operand"
    added = len(inner) - len(rows.inner)
    whole = shared is not None or low.token_dim(node.meta["val"])[1] == low.token_dim(source.meta["val"])[1]
    if added < 0 or not whole:
        raise Unlowerable("repeats tokens")
    own = (1,) * added + rows.inner
    steps = (0,) * added + rows.steps
    if any(a not in (1, b) for a, b in zip(own, inner, strict=True)):
        raise Unlowerable("repeats tokens")
    repeated = tuple(0 if a != b else step for a, b, step in zip(own, inner, steps, strict=True))
    view = rows.view(inner, repeated)
    return view if shared is None else replace(shared, inner=inner, operand=view)


def _repeat(low: Lowering, node: Node, source: Any, times: Sequence[int]) -> Any:
    """Repeats entries, or whole dimensions one after the other."""
    val = node.meta["val"]
    before = (1,) * (val.dim() - source.meta["val"].dim()) + tuple(source.meta["val"].shape)
    longer = [d for d, n in enumerate(times) if n != 1 and before[d] != 1]
    if not longer:
        return _expand(low, node, source)
    if len(longer) > 1 or any(n != 1 for d, n in enumerate(times) if d != longer[0]):
        raise Unlowerable("repeats several dimensions")
    return _join(low, node, [source] * times[longer[0]], longer[0], stacked=False)


def _repeat_interleave(low: Lowering, node: Node, source: Any, times: int, dim: int, **_: Any) -> Operand:
    """Repeats each entry of a dimension."""
    rows, d = low.place(source), _inner_dim(low, source.meta["val"], dim)
    inner = (*rows.inner[: d + 1], times, *rows.inner[d + 1 :])
    repeated = rows.view(inner, (*rows.steps[: d + 1], 0, *rows.steps[d + 1 :]))
    out = low.compute(Expression(inner, rows.dtype, operand=repeated))
    return out.view(low.inner_sizes(node.meta["val"]), contiguous(low.inner_sizes(node.meta["val"])))


def _join(low: Lowering, node: Node, parts: Any, dim: int, stacked: bool) -> Operand:
    """Joins parts along a dimension of a token: each is computed, or copied, into its place."""
    val = node.meta["val"]
    out, d = low.new(node), _inner_dim(low, val, dim)
    begin = 0
    for part in parts:
        if not stacked and part.meta["val"].shape[dim] == 0:
            continue
        value = low.expression(part)
        inner = value.inner
        if constant(low.module, part) is not None and not stacked:  # a row that all tokens share
            inner = (*out.inner[:d], inner[d - len(out.inner)], *out.inner[d + 1 :])
        count = 1 if stacked else inner[d]
        place = out.view((*out.inner[:d], count, *out.inner[d + 1 :]), out.steps, begin * out.steps[d])
        if stacked:
            place = place.view(out.inner[:d] + out.inner[d + 1 :], out.steps[:d] + out.steps[d + 1 :])
        low.compute(replace(value, inner=place.inner, dtype=out.dtype), place)
        begin += count
    return out


def _pad(low: Lowering, node: Node, source: Any, pad: Sequence[int], value: float = 0.0) -> Operand:
    """Appends entries of one value to the last dimension of a token."""
    if len(pad) != 2 or pad[0] != 0 or pad[1] < 0:
        raise Unlowerable("pads in another place than at the end of the last dimension")
    rows, out = low.expression(source), low.new(node)
    inner = out.inner[:-1]
    begin = out.inner[-1] - pad[1]
    low.compute(rows, out.view((*inner, begin), out.steps))
    added = out.view((*inner, pad[1]), out.steps, begin * out.steps[-1])
    low.compute(replace(number(value), inner=added.inner, dtype=out.dtype), added)
    return out


def _cat(low: Lowering, node: Node, parts: Any, dim: int = 0) -> Operand:
    return _join(low, node, parts, dim, stacked=False)


def _stack(low: Lowering, node: Node, parts: Any, dim: int = 0) -> Operand:
    return _join(low, node, parts, dim, stacked=True)


_VIEWS = (
    aten.view.default,
    aten.view_as.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
)

WRITERS: dict[Any, Writer] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.select.int: _select,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.expand_as.default: _expand,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.slice.Tensor: _slice,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    operator.getitem: _getitem,
}
