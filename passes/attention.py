"""Attention on a paged cache: each marker op becomes ``kv_write`` and ``paged_attention``.

The graph gets these further inputs, the same for all layers:

    slots        int64 (T)       where keys and values go: block · block_size + offset; negative: nowhere
    block_table  int32 (B, n)    blocks of each sequence
    query_start  int32 (B + 1)   first packed token of each sequence
    seq_lens     int32 (B)       positions of each sequence after this step
    max_seq_len  int             the largest of them
    k_cache      (layers, …), as torch_armllm.ops.attention.new_kv_cache makes it
    v_cache
    k_scales     the same, where the cache is int8
    v_scales
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.attention import kv_cache_shapes
from torch_armllm.passes.match import PassContext, aten, call, constant, fake_mode, is_op, new_constant, value

SCALES = ("k_scales", "v_scales")
BLOCK_SIZE = 32


def _by_token(graph: fx.Graph, node: Any) -> Node:
    """``(1, heads, T, size)`` → ``(T, heads, size)``, by taking the transpose back where there is one."""
    if is_op(node, aten.transpose.int) and tuple(node.args[1:]) == (1, 2):
        tokens_first = node.args[0]
    else:
        tokens_first = call(graph, aten.transpose.int, node, 1, 2)
    return call(graph, aten.select.int, tokens_first, 0, 0)


def add_inputs(
    module: fx.GraphModule, near: Node, tokens: Any, caches: dict[str, tuple[torch.dtype, tuple[Any, ...]]]
) -> dict[str, Node]:
    """Adds the inputs of a paged step to a graph.

    Args:
        module: the graph's module.
        near: a node with the graph's fake tensors.
        tokens: their number, as the graph knows it.
        caches: dtype and shape of each of the cache's tensors.
    """
    graph = module.graph
    mode = fake_mode(near)
    shapes: dict[str, tuple[torch.dtype, tuple[Any, ...]] | None] = {
        "slots": (torch.int64, (tokens,)),
        "block_table": (torch.int32, (2, 4)),
        "query_start": (torch.int32, (3,)),
        "seq_lens": (torch.int32, (2,)),
        "max_seq_len": None,
        **caches,
    }
    made: dict[str, Node] = {}
    after = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for name, tensor in shapes.items():
        with graph.inserting_after(after):
            node = graph.placeholder(name)
        if tensor is None:
            node.meta["val"] = 64
        else:
            with mode:
                node.meta["val"] = torch.empty(tensor[1], dtype=tensor[0])
        made[name] = after = node
    return made


def _add_inputs(
    module: fx.GraphModule, first: Node, layers: int, cache_dtype: torch.dtype | None
) -> dict[str, Node]:
    k, v = value(first.args[1]), value(first.args[2])  # type: ignore[arg-type]
    dtype = cache_dtype or k.dtype
    sizes = (int(k.shape[1]), int(k.shape[3]), int(v.shape[3]))
    keys, values, scales = kv_cache_shapes(8, *sizes, BLOCK_SIZE, dtype, layers)
    caches: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {
        "k_cache": (dtype, keys),
        "v_cache": (dtype, values),
    }
    if scales is not None:
        caches["k_scales"] = caches["v_scales"] = (torch.float32, scales)
    return add_inputs(module, first, k.shape[2], caches)


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
    given = _add_inputs(module, nodes[0], len(order), context.cache_dtype)
    for node in nodes:
        q, k, v, layer, scale, window, softcap, sinks = node.args
        own = constant(module, sinks)
        if own is not None and own.dtype != torch.float32:
            sinks = new_constant(module, node, "sinks", own.float())
        with graph.inserting_before(node):
            k_cache, v_cache, *scales = (
                call(graph, aten.select.int, given[name], 0, order[layer])
                for name in ("k_cache", "v_cache", *SCALES)
                if name in given
            )
            keys, values, queries = (_by_token(graph, x) for x in (k, v, q))
            write = torch.ops.armllm.kv_write.default
            call(graph, write, keys, values, k_cache, v_cache, given["slots"], *scales)
            out = call(
                graph,
                torch.ops.armllm.paged_attention.default,
                *(queries, k_cache, v_cache, given["block_table"], given["query_start"], given["seq_lens"]),
                *(given["max_seq_len"], scale, window, softcap, sinks, *scales),
            )
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
