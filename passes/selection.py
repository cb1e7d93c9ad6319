"""Selection of tokens by indexers: each marker becomes a write of the indexer's keys and ``select_tokens``.

The graph gets one more input: ``index_keys`` holds the keys of all indexers, ``(indexers, blocks, block size,
index size)``, in the blocks of the latents.  A part of the queries and keys may be rotated by position;
recognized rotations are done in place.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, match, strip, value
from torch_armllm.passes.lib.index_keys import index_sizes, selections, write_keys
from torch_armllm.passes.lib.mla_rope import MlaRopeTables, MlaRotation, match_rotation
from torch_armllm.passes.lib.paged_inputs import add_index_input, paged_inputs
from torch_armllm.passes.lib.rope_match import joined_parts, joins_last_dim
from torch_armllm.passes.mla import leads_only_to

armllm = torch.ops.armllm


@dataclass(frozen=True)
class _Rotated:
    """A tensor ``(1, T, heads, size)`` of which some elements are rotated."""

    whole: Node
    """Before rotation."""
    rotation: MlaRotation
    begin: int
    """First rotated element."""

    def rotated(self, graph: fx.Graph) -> Node:
        """Returns the elements to rotate, ``(T, heads, rope_size)``."""
        tokens = call(graph, aten.select.int, self.whole, 0, 0)
        end = self.begin + int(value(self.rotation.x).shape[-1])
        return call(graph, aten.slice.Tensor, tokens, -1, self.begin, end)


def _match(node: Any) -> _Rotated | None:
    """Matches the two parts of a split joined again, of which one is rotated."""
    end = node
    node = strip(node, aten.squeeze.dim)
    joined = joined_parts(node)
    if len(joined) != 2 or not joins_last_dim(node):
        return None
    for number, part in enumerate(joined):
        rotation = match_rotation(part)
        other = match(joined[1 - number], operator.getitem, index=1 - number)
        own = None if rotation is None else match(rotation.x, operator.getitem, index=number)
        if rotation is None or other is None or own is None or own.source is not other.source:
            continue
        split = match(own.source, aten.split_with_sizes.default)
        if split is None or len(split.split_sizes) != 2 or split.dim not in (-1, 3):
            continue
        if leads_only_to(split.self, end):
            return _Rotated(split.self, rotation, sum(split.split_sizes[:number]))
    return None


class _Selection:
    """Rewrites the markers of one graph."""

    def __init__(self, module: fx.GraphModule, inputs: dict[str, Node], cache: Node) -> None:
        self.graph = module.graph
        self.inputs = inputs
        self.cache = cache
        self.tables = MlaRopeTables(module)

    def _operands(self, marker: Node) -> tuple[Node, Node]:
        """Returns queries ``(T, heads, size)`` and keys ``(T, size)``."""
        graph = self.graph
        operands = OpCall(marker).q, OpCall(marker).k
        q, k = map(_match, operands)
        table = None
        if q and k and q.rotation.angles == k.rotation.angles:
            table = self.tables.get(q.rotation, marker)
        with graph.inserting_before(marker):
            if q is None or k is None or table is None:
                return tuple(call(graph, aten.select.int, x, 0, 0) for x in operands)  # type: ignore[return-value]
            pairs = q.rotation.interleaved, q.rotation.unzip
            call(graph, armllm.rope_.default, q.rotated(graph), k.rotated(graph), *table, *pairs)
            keys = call(graph, aten.select.int, k.whole, 0, 0)
            return call(graph, aten.select.int, q.whole, 0, 0), call(graph, aten.select.int, keys, 1, 0)

    def select(self, marker: Node, number: int) -> None:
        """Replaces a marker by the selection from its cached keys."""
        graph = self.graph
        _, _, weights, scale, top_k = marker.args
        q, k = self._operands(marker)
        with graph.inserting_before(marker):
            cache = call(graph, aten.select.int, self.cache, 0, number)
            write_keys(graph, k, cache, self.inputs["slots"])
            factors = call(graph, aten.select.int, weights, 0, 0)
            steps = (self.inputs[name] for name in ("block_table", "query_start", "seq_lens", "max_seq_len"))
            chosen = call(graph, armllm.select_tokens.default, q, factors, cache, *steps, scale, top_k)
        marker.replace_all_uses_with(chosen)
        graph.erase_node(marker)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all markers; does nothing before attention is rewritten."""
    found, inputs = selections(module, armllm.selection.default), paged_inputs(module)
    if not found or not inputs:
        return 0
    dtype = value(inputs["k_cache"]).dtype
    if not dtype.is_floating_point:
        dtype = value(OpCall(found[0]).k).dtype
    rewriting = _Selection(module, inputs, add_index_input(module, found[0], dtype, index_sizes(module)))
    for number, marker in enumerate(found):
        rewriting.select(marker, number)
    module.graph.eliminate_dead_code()
    return len(found)
