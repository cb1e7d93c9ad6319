"""Rotary embeddings of queries and keys: ``x·cos + rotate_half(x)·sin`` becomes the in-place op ``rope_``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    is_op,
    match,
    new_constant,
    unwidened,
    value,
    without_token_factor,
)
from torch_armllm.passes.lib.rope_match import RopeTables, joined_parts, match_rope
from torch_armllm.passes.lib.rope_probe import RotationFinder

_READERS = (torch.ops.armllm.attention.default, torch.ops.armllm.block_selection.default)
"""Markers whose first operands are queries and keys."""
_NORMS = (torch.ops.armllm.rms_norm.default, torch.ops.armllm.layer_norm.default)


@dataclass
class _Heads:
    """Queries or keys as an attention reads them, and as they were before the norms in front of it.

    Attributes:
        node: before the norms, ``(1, heads, T, size)``.
        end: after the norms, without further elements that an attention reads beside them, and before
            factors of the tokens.
        norms: of the heads, the last one first; or products with constants.
        by_token: True if ``node`` is ``(1, T, heads, size)``.
    """

    node: Any
    end: Any
    norms: tuple[Node | _Factors, ...] = ()
    by_token: bool = False


@dataclass(frozen=True)
class _Factors:
    """Factors of the elements of heads that are the same for all tokens, ``(1, 1, heads, size)``."""

    values: Tensor


def _factors(module: fx.GraphModule, heads: _Heads) -> tuple[Node, _Factors] | None:
    """Returns the heads that a node multiplies by constant factors, and these; None for another node."""
    product = match(heads.node, aten.mul.Tensor)
    for x, other in () if product is None else ((product.self, product.other), (product.other, product.self)):
        factors = constant(module, other)
        same = isinstance(x, Node) and value(x).dim() == 4 and value(x).shape == value(heads.node).shape
        if factors is None or not same or value(x).dtype != value(heads.node).dtype:
            continue
        rows = factors.reshape((1,) * (4 - factors.dim()) + factors.shape)
        rows = rows if heads.by_token else rows.transpose(1, 2)
        return (x, _Factors(rows.contiguous())) if rows.shape[1] == 1 else None
    return None


def _before_norms(module: fx.GraphModule, operand: Any) -> _Heads | None:
    """Follows an attention's operand through the norms of its heads; None if anything else reads it."""
    if not all(is_op(user, *_READERS) for user in operand.users):
        return None
    end = _without_bias(operand)
    heads = _Heads(end, end)
    while True:
        swapped = match(heads.node, aten.transpose.int, dim0=1, dim1=2)
        before = heads if swapped is None else replace(heads, node=swapped.self, by_token=not heads.by_token)
        if is_op(before.node, *_NORMS):
            x, norm = OpCall(before.node).x, before.node
        elif scaled := _factors(module, before):
            x, norm = scaled
        else:
            return heads
        if len(x.users) != 1 or (swapped is not None and len(before.node.users) != 1):
            return None
        heads = replace(before, node=x, norms=(*heads.norms, norm))


def _without_bias(operand: Any) -> Any:
    """Returns queries or keys without the element of a key's bias and without factors of their tokens.

    They are returned as they are if something else reads what they were made of.
    """
    source, factor = without_token_factor(operand)
    if factor is not None:
        return source if len(source.users) == 1 else operand
    if is_op(operand, aten.constant_pad_nd.default):
        source = OpCall(operand).self
    elif len(parts := joined_parts(operand)) == 2 and OpCall(operand).dim == -1:
        source, added = parts
        if value(added).shape[-1] != 1 or value(source).shape[-1] == 1:
            return operand
    else:
        return operand
    return source if len(source.users) == 1 else operand


def _unwidened(x: Node, rotated: Node) -> Node:
    """Returns heads as they were before they became float32 for their rotation, as the op computes it so."""
    source = unwidened(x)
    alone = isinstance(source, Node) and value(source).dtype == value(rotated).dtype
    return source if alone and len(source.users) == 1 else x


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites the rotation of the queries and keys of every attention and indexer of blocks.

    The op rotates in place: queries and keys are results of a linear layer or a norm that nothing else reads.
    If something does, the attention is not changed.  Keys that several attentions read are rotated before the
    first of them.  Norms may follow the rotation.  `torch_armllm.passes.lib.rope_probe` finds rotations in
    other decompositions.
    """
    graph = module.graph
    rewriter = _RopeRewriter(module)
    num_rewritten = 0
    for node in list(graph.nodes):
        if is_op(node, *_READERS):
            num_rewritten += rewriter.rewrite(node)
    graph.eliminate_dead_code()
    return num_rewritten


@dataclass
class _Operand:
    """Queries or keys, and the parameters of their rotation.

    ``table`` identifies the rotation; ``layout`` holds the trailing arguments of ``rope_``.  Heads of several
    ``parts`` are reordered before it: attention multiplies queries and keys in any order that they share.
    """

    x: Node
    table: Any
    make_table: Callable[[], tuple[Node, Node]]
    heads: _Heads
    layout: tuple[bool, ...] = (False,)
    parts: int = 1


class _RopeRewriter:
    """Rewrites the attentions of one graph, in order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.tables = RopeTables(module)
        self.rotations = RotationFinder(module)
        self.rotated: set[Node] = set()
        """Queries and keys that were already rotated in place."""

    def _known(self, operand: Any, before: Node) -> _Operand | None:
        return self._matched(operand, before, any_angles=False)

    def _matched(self, operand: Any, before: Node, any_angles: bool = True) -> _Operand | None:
        heads = _before_norms(self.module, operand)
        match = None if heads is None or heads.by_token else match_rope(heads.node)
        if heads is None or match is None or len(match.x.users) != 1:
            return None
        if not (any_angles or self.tables.knows(match)):
            return None
        return _Operand(match.x, (match.cos, match.sin), lambda: self.tables.get(match, before), heads)

    def _probed(self, operand: Any, before: Node) -> _Operand | None:
        heads = _before_norms(self.module, operand)
        probed = None if heads is None else self.rotations.find(heads.node, heads.by_token)
        if heads is None or probed is None:
            return None
        x, rotation = probed
        layout = (rotation.interleaved, rotation.unzip)
        make = lambda: self.tables.get_probed(rotation, before)  # noqa: E731
        if rotation.parts > 1 and (heads.norms or heads.end is not heads.node):
            return None  # norms have weights in another order, and a bias follows the last element
        return _Operand(_unwidened(x, heads.node), rotation, make, heads, layout, rotation.parts)

    def rewrite(self, node: Node) -> bool:
        """Inserts the op before one marker; returns False if its operands are no known rotations."""
        q, k = OpCall(node).q, OpCall(node).k
        if q in self.rotated:  # before an earlier attention to the same keys
            return True
        longer = [x for x in (q, k) if isinstance(x, Node) and _without_bias(x) is not x]
        before = min([node, *longer])
        for find in (self._known, self._probed, self._matched):
            queries = find(q, before)
            if queries is not None and k in self.rotated:
                self._rotate(before, queries, None)
                return True
            keys = find(k, before) if k not in self.rotated else None
            if queries is not None and keys is not None and queries.table == keys.table:
                self._rotate(before, queries, keys)
                return True
        return False

    def _reordered(self, x: Node, parts: int) -> Node:
        """Returns heads ``(1, T, n, size)`` in the order of `halves_first`."""
        *_, count, size = value(x).shape
        halves = call(self.graph, aten.view.default, x, [1, -1, count, parts, 2, size // parts // 2])
        swapped = call(self.graph, aten.transpose.int, halves, 3, 4)
        return call(self.graph, aten.reshape.default, swapped, [1, -1, count, size])  # copies them

    def _rotate(self, before: Node, q: _Operand, k: _Operand | None) -> None:
        table = q.make_table()
        graph = self.graph
        with graph.inserting_before(before):
            for side in (q, k):
                if side is not None and side.parts > 1:
                    side.x = self._reordered(side.x, side.parts)
            keys = call(graph, aten.slice.Tensor, q.x, 2, 0, 0) if k is None else k.x
            call(graph, torch.ops.armllm.rope_.default, q.x, keys, *table, *q.layout)
            for side in (q, k):
                if side is not None:
                    heads, dtype = side.x, value(side.heads.node).dtype
                    if value(heads).dtype != dtype:
                        heads = call(graph, aten.to.dtype, heads, dtype)
                    for norm in reversed(side.heads.norms):
                        heads = self._normed(before, heads, norm)
                    rotated = call(graph, aten.transpose.int, heads, 1, 2)
                    side.heads.end.replace_all_uses_with(rotated)
                    self.rotated.add(rotated)

    def _normed(self, before: Node, heads: Node, norm: Node | _Factors) -> Node:
        if isinstance(norm, _Factors):
            factors = new_constant(self.module, before, "head_factors", norm.values)
            return call(self.graph, aten.mul.Tensor, heads, factors)
        return call(self.graph, norm.target, *OpCall(norm).arguments(x=heads))
