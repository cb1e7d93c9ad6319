"""Marker op of an indexer of blocks: the selection of the blocks of tokens that each KV head attends to.

Models compute scores of all tokens, take the largest of each block, and then the indices of the highest.
Exported with blocks of one token, these nodes become the marker, which keeps the indexer's queries and keys.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.markers.declare import marker
from torch_armllm.capture.markers.selection import UnknownSelection, is_call, selected_by, take, uncast
from torch_armllm.capture.markers.selection_limits import Selects
from torch_armllm.kv_cache.shapes import CacheShape
from torch_armllm.ops.op_call import OpCall
from torch_armllm.ops.select.blocks import block_scores
from torch_armllm.ops.select.reference import highest

aten = torch.ops.aten


@marker(
    "block_selection(Tensor q, Tensor k, int span, int top_k, int nearest) -> Tensor",
    lambda a: a.q.new_empty((*a.q.shape[:3], a.k.shape[2]), dtype=torch.bool),
)
def block_selection(q: Tensor, k: Tensor, span: int, top_k: int, nearest: int) -> Tensor:
    """Selects the nearest blocks and those of the highest scores; the reference implementation.

    Args:
        q: queries ``(1, heads, T, head_size)``.
        k: keys ``(1, 1, T, head_size)``, which all heads share.
        span: tokens of a block.
        top_k: most blocks that a token and head selects.
        nearest: blocks up to a token's own that are always selected.

    Returns:
        bool ``(1, heads, T, T)``: for each head and token, the earlier tokens of the selected blocks.
    """
    count = q.shape[2]
    seen = torch.arange(1, count + 1, device=q.device)
    scores = block_scores(q[0].transpose(0, 1), k[0, 0], seen, span, nearest)
    chosen = highest(scores, min(top_k, scores.shape[-1]))
    blocks = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    tokens = blocks.repeat_interleave(span, -1)[..., :count]
    return (tokens & torch.ones(count, count, dtype=torch.bool, device=q.device).tril())[None]


def mark_block_selections(graph: fx.Graph, selects: Selects) -> None:
    """Replaces the indices of blocks that attentions are given by markers.

    Args:
        graph: exported with indexers that select one block of one token.
        selects: what they select.

    Raises:
        UnknownSelection: indices are computed in another way, or no op attends to such blocks.
    """
    if selects.span % CacheShape.block_size:
        raise UnknownSelection(f"blocks of {selects.span} tokens are no blocks of the cache")
    for node in list(graph.nodes):
        if (indices := selected_by(node)) is None:
            continue
        _check_attention(node)
        q, k, changed = _operands(indices)
        heads, kv_heads = (int(x.meta["val"].shape[1]) for x in (q, OpCall(node).k))
        if kv_heads % heads:
            raise UnknownSelection(f"{heads} heads select blocks for {kv_heads} KV heads")
        with graph.inserting_before(indices):
            arguments = (q, k, selects.span, selects.count, selects.nearest)
            marked = graph.call_function(torch.ops.armllm.block_selection.default, arguments)
        marked.meta = dict(indices.meta)
        with q.meta["val"].fake_mode:
            marked.meta["val"] = torch.ops.armllm.block_selection(
                q.meta["val"], k.meta["val"], *arguments[2:]
            )
        OpCall(node).replace(selected=marked)
        graph.eliminate_dead_code()
        if changed is not None:  # graphs keep operators that overwrite a tensor, even if none reads it
            graph.erase_node(changed)
    graph.eliminate_dead_code()


def _check_attention(node: Node) -> None:
    if OpCall(node).given - {"q", "k", "v", "layer", "scale", "selected"}:
        raise UnknownSelection("attention to selected blocks has a window, sinks or a bias")


def _operands(indices: Any) -> tuple[Node, Node, Node | None]:
    """Returns queries and keys of the scores whose highest are taken, and what overwrites some of them."""
    if not is_call(indices, aten.masked_fill.Scalar) or OpCall(indices).value != -1:
        raise UnknownSelection(f"{indices} does not mark blocks that are not selected")
    top = take(OpCall(indices).self, operator.getitem, 1)
    blocks, changed = take(top, aten.topk.default, 1), None
    if is_call(blocks, aten.scatter_.value) and OpCall(blocks).value == math.inf:  # the nearest blocks
        blocks, changed = OpCall(blocks).self, blocks
    scores = take(blocks, aten.amax.default, [-1])
    if is_call(scores, aten.view.default):
        scores = OpCall(scores).self
    if not is_call(scores, aten.masked_fill.Scalar) or OpCall(scores).value != -math.inf:
        raise UnknownSelection(f"{scores} does not hide later tokens")
    products = OpCall(scores).self
    if not is_call(products, aten.matmul.default):
        raise UnknownSelection(f"{products} is no product of queries and keys")
    factors = OpCall(products)
    q, keys = uncast(factors.self), uncast(take(factors.other, aten.transpose.int, -1, -2))
    sizes = [x.meta["val"].shape for x in (q, keys)]
    if [len(size) for size in sizes] != [4, 4] or sizes[1][1] != 1:
        raise UnknownSelection("operands of an indexer of blocks have other dimensions")
    return q, keys, changed
