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
    k_cache_1 …  the same for further groups of layers, where layers differ in shape
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.attention import kv_cache_shapes
from torch_armllm.passes.lib.cache_layout import CacheLayout, cache_layout
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    fake_mode,
    is_op,
    new_constant,
    value,
)

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


def _cache_inputs(layout: CacheLayout, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[Any, ...]]]:
    """Names, dtypes and shapes of the cache's tensors, in the order of `MixedCache`."""
    caches: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {}
    for group, sizes in enumerate(layout.sizes):
        keys, values, scales = kv_cache_shapes(8, *sizes, BLOCK_SIZE, dtype, layout.count(group))
        caches[_name("k_cache", group)] = (dtype, keys)
        caches[_name("v_cache", group)] = (dtype, values)
        if scales is not None:
            caches.update({_name(name, group): (torch.float32, scales) for name in SCALES})
    return caches


def _name(tensor: str, group: int) -> str:
    return f"{tensor}_{group}" if group else tensor


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all attentions, or none if the pass is off.

    Returns:
        The number of attentions rewritten.
    """
    graph = module.graph
    nodes = [n for n in graph.nodes if is_op(n, torch.ops.armllm.attention.default)]
    if not context.paged or not nodes:
        return 0
    layout = context.layout or cache_layout(module)
    first = value(nodes[0].args[1])
    given = add_inputs(
        module, nodes[0], first.shape[2], _cache_inputs(layout, context.cache_dtype or first.dtype)
    )
    written: set[tuple[int, int]] = set()
    for node in nodes:
        q, k, v, layer, scale, window, softcap, sinks = node.args
        own = constant(module, sinks)
        if own is not None and own.dtype != torch.float32:
            sinks = new_constant(module, node, "sinks", own.float())
        group, number = place = layout.places[layer]
        with graph.inserting_before(node):
            k_cache, v_cache, *scales = (
                call(graph, aten.select.int, given[_name(tensor, group)], 0, number)
                for tensor in ("k_cache", "v_cache", *SCALES)
                if tensor in given
            )
            if place not in written:  # else: another layer's keys and values, which are there already
                written.add(place)
                keys, values = (_by_token(graph, x) for x in (k, v))
                write = torch.ops.armllm.kv_write.default
                call(graph, write, keys, values, k_cache, v_cache, given["slots"], *scales)
            out = call(
                graph,
                torch.ops.armllm.paged_attention.default,
                *(_by_token(graph, q), k_cache, v_cache, given["block_table"], given["query_start"]),
                *(given["seq_lens"], given["max_seq_len"], scale, window, softcap, sinks, *scales),
            )
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
