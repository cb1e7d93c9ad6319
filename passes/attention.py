"""Attention on a paged cache: each marker op becomes ``kv_write`` and ``paged_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.selection import selected_by
from torch_armllm.ops.attention import kv_cache_shapes, paged_attention
from torch_armllm.ops.declare import per_head
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.cache_layout import CacheLayout, cache_layout
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    as_float32,
    aten,
    call,
    call_op,
    constant,
    is_op,
    new_constant,
    tokens_first,
    value,
)
from torch_armllm.passes.lib.paged_inputs import BLOCK_SIZE, add_paged_inputs, cache_name

SCALES = ("k_scales", "v_scales")
STEPS = ("block_table", "query_start", "seq_lens", "max_seq_len")


def _cache_inputs(layout: CacheLayout, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[Any, ...]]]:
    """Returns names, dtypes and shapes of the cache's tensors, in the order of `MixedCache`."""
    caches: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {}
    for group, (kv_heads, head_size, value_size) in enumerate(layout.sizes):
        sizes = (kv_heads, head_size, value_size)
        keys, values, scales = kv_cache_shapes(8, *sizes, BLOCK_SIZE, dtype, layout.count(group))
        caches[cache_name("k_cache", group)] = (dtype, keys)
        caches[cache_name("v_cache", group)] = (dtype, values)
        if scales is not None:
            caches.update({cache_name(name, group): (torch.float32, scales) for name in SCALES})
    return caches


def _options(module: fx.GraphModule, marker: OpCall) -> dict[str, Any]:
    """Returns the arguments of ``paged_attention`` of which the marker has the values."""
    options = {name: getattr(marker, name) for name in marker.given - {"q", "k", "v", "layer", "factors"}}
    options["relative"], options["profiles"] = _profiles(module, marker.node, marker.factors, marker.profiles)
    for name in per_head(paged_attention):
        options[name] = as_float32(module, marker.node, name, getattr(marker, name))
    return options


def _profiles(module: fx.GraphModule, node: Node, factors: Any, profiles: Any) -> tuple[Any, Any]:
    """Returns factors ``(T, heads, rank)`` and profiles from the largest distance to 0, both in float32."""
    if factors is None:
        return None, None
    with module.graph.inserting_before(node):
        rows = call(module.graph, aten.select.int, factors, 0, 0)
    tensor = constant(module, profiles)
    assert tensor is not None, "profiles are weights of the model"
    bank = new_constant(module, node, "profiles", tensor.float().flip(1).contiguous())
    return as_float32(module, node, "relative", rows), bank


def _is_latent(node: Node) -> bool:
    """True if an attention is left to another pass, as it reads tokens that are selected singly."""
    return is_op(selected_by(node), torch.ops.armllm.selection.default)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites attentions to all tokens or to selected blocks; does nothing if the context is not paged."""
    graph = module.graph
    nodes = [n for n in graph.nodes if is_op(n, torch.ops.armllm.attention.default) and not _is_latent(n)]
    if not context.paged or not nodes:
        return 0
    layout = context.layout or cache_layout(module)
    first = value(OpCall(nodes[0]).k)
    inputs = add_paged_inputs(
        module, nodes[0], first.shape[2], _cache_inputs(layout, context.cache_dtype or first.dtype)
    )
    written: set[tuple[int, int]] = set()
    for node in nodes:
        marker = OpCall(node)
        options = _options(module, marker)
        group, number = position = layout.positions[marker.layer]
        with graph.inserting_before(node):
            k_cache, v_cache, *scales = (
                call(graph, aten.select.int, inputs[cache_name(tensor, group)], 0, number)
                for tensor in ("k_cache", "v_cache", *SCALES)
                if tensor in inputs
            )
            # otherwise an earlier layer has written the same keys and values
            if marker.ahead or position not in written:
                written.add(position)
                keys, values = (tokens_first(graph, x) for x in (marker.k, marker.v))
                write = torch.ops.armllm.kv_write.default
                call(graph, write, keys, values, k_cache, v_cache, inputs["slots"], *scales)
            arguments = {name: inputs[name] for name in STEPS}
            arguments |= {"q": tokens_first(graph, marker.q), "k_cache": k_cache, "v_cache": v_cache}
            arguments |= dict(zip(SCALES, scales, strict=True)) if scales else {}
            if marker.selected is None:
                out = call_op(graph, torch.ops.armllm.paged_attention.default, **arguments, **options)
            else:
                out = call_op(
                    graph,
                    torch.ops.armllm.block_attention.default,
                    **arguments,
                    chosen=marker.selected,
                    span=OpCall(marker.selected).span,
                    scale=marker.scale,
                )
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
