"""Bias of a key: a number that each token adds to the scores of all tokens that attend to it.

Such a bias is one more element of the token's key, and queries have a constant there.  It is recognized by
what a graph computes from it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.attention_operands import insert_call
from torch_armllm.capture.probing import evaluate, tensor_of

_aten = torch.ops.aten
_LENGTH = 5
"""Tokens of the random numbers on which a graph is compared with a bias of keys."""


def joined(graph: fx.Graph, q: Node, k: Node, scale: float, bias: Node) -> tuple[Node, Node] | None:
    """Returns queries and keys with one more element, whose products are a bias of the keys.

    Calls are inserted at the graph's insertion point.

    Args:
        graph: of the nodes.
        q: queries ``(1, heads, T, head_size)``.
        k: keys ``(1, kv_heads, T, head_size)``.
        scale: factor of the products.
        bias: ``(1, heads, T, T)``.

    Returns:
        None if the bias is not the same for all queries of a head.
    """
    heads, kv_heads = (int(tensor_of(x).shape[1]) for x in (q, k))
    source = _by_key(bias, heads, kv_heads)
    if source is None:
        return None
    constant = 2.0 ** round(-math.log2(scale))  # has no rounding in any dtype
    dtype = tensor_of(k).dtype
    column = insert_call(graph, _aten.mul.Tensor, source, 1.0 / (scale * constant))
    if tensor_of(column).dtype != dtype:
        column = insert_call(graph, _aten.to.dtype, column, dtype)
    column = insert_call(graph, _aten.unsqueeze.default, column, -1)
    keys = insert_call(graph, _aten.cat.default, [k, column], -1)
    queries = graph.call_function(_aten.constant_pad_nd.default, (q, [0, 1], constant))
    shape = tensor_of(q).shape
    # torch's own shape function of the operator makes the number of tokens a constant
    queries.meta["val"] = tensor_of(q).new_empty((*shape[:-1], shape[-1] + 1))
    return queries, keys


def _by_key(bias: Node, heads: int, kv_heads: int) -> Node | None:
    """Returns the numbers of the keys, ``(1, kv_heads, T)``, that a bias repeats for all queries; or None."""
    chain: list[Node] = []
    node: Any = bias
    while isinstance(node, Node) and node.op == "call_function":
        shape = tensor_of(node).shape
        if len(shape) == 3 and shape[:2] == (1, kv_heads) and isinstance(shape[2], torch.SymInt):
            return node if chain and _repeats(node, chain[::-1], heads // kv_heads) else None
        chain.append(node)
        sources = [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), Tensor)]
        node = sources[0] if len(sources) == 1 else None
    return None


def _repeats(source: Node, chain: list[Node], groups: int) -> bool:
    """True if a chain of operators repeats numbers of keys for all queries, and for the heads of a group."""
    module = source.graph.owning_module
    assert module is not None
    kv_heads = int(tensor_of(source).shape[1])
    numbers = torch.randn(1, kv_heads, _LENGTH, generator=torch.Generator().manual_seed(0))
    values: dict[Node, Any] = {source: numbers}
    try:
        for node in chain:
            values[node] = evaluate(node, values, module, _LENGTH)
    except Exception:  # noqa: BLE001 - any operator may fail outside of its graph
        return False
    expected = numbers.repeat_interleave(groups, 1)[:, :, None].expand(-1, -1, _LENGTH, -1)
    result: Tensor = values[chain[-1]]
    return result.shape == expected.shape and torch.equal(result, expected)
