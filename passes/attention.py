"""Attention on a paged cache: each marker op becomes ``kv_write`` and ``paged_attention``.

The graph gets these further inputs, the same for all layers:

    slots        int64 (T)       where keys and values go: block · block_size + offset; negative: nowhere
    block_table  int32 (B, n)    blocks of each sequence
    query_start  int32 (B + 1)   first packed token of each sequence
    seq_lens     int32 (B)       positions of each sequence after this step
    max_seq_len  int             the largest of them
    k_cache      (layers, blocks, kv_heads, head_size, block_size)
    v_cache      (layers, blocks, kv_heads, block_size, value_size)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.match import PassContext, aten, call, fake_mode, is_op, value

INPUTS = ("slots", "block_table", "query_start", "seq_lens", "max_seq_len", "k_cache", "v_cache")
BLOCK_SIZE = 32


def _by_token(graph: fx.Graph, node: Any) -> Node:
    """``(1, heads, T, size)`` → ``(T, heads, size)``, by taking the transpose back where there is one."""
    if is_op(node, aten.transpose.int) and tuple(node.args[1:]) == (1, 2):
        tokens_first = node.args[0]
    else:
        tokens_first = call(graph, aten.transpose.int, node, 1, 2)
    return call(graph, aten.select.int, tokens_first, 0, 0)


def _add_inputs(module: fx.GraphModule, first: Node, layers: int) -> dict[str, Node]:
    graph = module.graph
    k, v = value(first.args[1]), value(first.args[2])  # type: ignore[arg-type]
    kv_heads, head, value_size = k.shape[1], k.shape[3], v.shape[3]
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    mode = fake_mode(first)
    shapes: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {
        "slots": (torch.int64, (k.shape[2],)),
        "block_table": (torch.int32, (2, 4)),
        "query_start": (torch.int32, (3,)),
        "seq_lens": (torch.int32, (2,)),
        "k_cache": (k.dtype, (layers, 8, kv_heads, head, BLOCK_SIZE)),
        "v_cache": (v.dtype, (layers, 8, kv_heads, BLOCK_SIZE, value_size)),
    }
    made: dict[str, Node] = {}
    after = last_input
    for name in INPUTS:
        with graph.inserting_after(after):
            node = graph.placeholder(name)
        if name == "max_seq_len":
            node.meta["val"] = 64
        else:
            dtype, shape = shapes[name]
            with mode:
                node.meta["val"] = torch.empty(shape, dtype=dtype)
        made[name] = after = node
    return made


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all attentions, or none if the pass is off or layers differ in shape.

    Returns:
        The number of attentions rewritten.
    """
    graph = module.graph
    nodes = [n for n in graph.nodes if is_op(n, torch.ops.armllm.attention.default)]
    if not context.paged or not nodes:
        return 0
    shapes = {(value(n.args[1]).shape[1::2], value(n.args[2]).shape[1::2]) for n in nodes}
    if len(shapes) > 1:
        return 0
    order = {layer: i for i, layer in enumerate(sorted({n.args[3] for n in nodes}))}
    given = _add_inputs(module, nodes[0], len(order))
    for node in nodes:
        q, k, v, layer, scale, window, softcap, sinks = node.args
        with graph.inserting_before(node):
            k_cache = call(graph, aten.select.int, given["k_cache"], 0, order[layer])
            v_cache = call(graph, aten.select.int, given["v_cache"], 0, order[layer])
            keys, values, queries = (_by_token(graph, x) for x in (k, v, q))
            call(graph, torch.ops.armllm.kv_write.default, keys, values, k_cache, v_cache, given["slots"])
            out = call(
                graph,
                torch.ops.armllm.paged_attention.default,
                *(queries, k_cache, v_cache, given["block_table"], given["query_start"], given["seq_lens"]),
                *(given["max_seq_len"], scale, window, softcap, sinks),
            )
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
