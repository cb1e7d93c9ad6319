"""Attention to compressed entries on a paged cache.

Each marker becomes ``mla_write`` and ``entry_attention``, and each selection ``select_entries``.  The graph
gets the inputs of `torch_armllm.passes.lib.paged_inputs`; ``k_cache`` holds the tokens of all layers,
``(layers, blocks, block size, size)``, and ``entries_0`` … those of compressors, ``(compressors, blocks,
entries of a block, size)``.  The pass of recurrent layers writes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.compression import entry_attentions
from torch_armllm.ops.compress import most_per_block
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.attention import STEPS
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.entry_layout import (
    PLACE,
    EntryLayout,
    compressors_of,
    entries_name,
    entry_layout,
    window_attentions,
)
from torch_armllm.passes.lib.graph import as_float32, aten, call, is_op, tokens_first, value
from torch_armllm.passes.lib.index_keys import write_keys
from torch_armllm.passes.lib.paged_inputs import BLOCK_SIZE, add_paged_inputs

armllm = torch.ops.armllm


class _Rewriting:
    """Rewrites the markers of one graph."""

    def __init__(self, module: fx.GraphModule, layout: EntryLayout, inputs: dict[str, Node]) -> None:
        self.module = module
        self.graph = module.graph
        self.layout = layout
        self.inputs = inputs
        self.steps = [inputs[name] for name in STEPS]
        for compressor, place in zip(compressors_of(module), layout.places, strict=True):
            compressor.meta[PLACE] = place

    def entries(self, compressor: Any) -> Node:
        """Returns the cache of a compressor's entries."""
        group, number = compressor.meta[PLACE]
        return call(self.graph, aten.select.int, self.inputs[entries_name(group)], 0, number)

    def select(self, marker: Node) -> None:
        """Replaces the marker of a selection."""
        q, entries, weights, scale, top_k, rate = marker.args
        graph = self.graph
        with graph.inserting_before(marker):
            queries, factors = (call(graph, aten.select.int, x, 0, 0) for x in (q, weights))
            sizes = (BLOCK_SIZE, rate, scale, top_k)
            select = armllm.select_entries.default
            chosen = call(graph, select, queries, factors, self.entries(entries), *self.steps, *sizes)
        self._replace(marker, chosen)

    def attend(self, marker: Node) -> None:
        """Replaces the marker of an attention, with or without entries."""
        graph = self.graph
        q, kv, other, layer, scale, window, *rest = marker.args
        entries: Any = None
        selected: Any = None
        rate: Any = 0
        if is_op(marker, armllm.attention_to_entries.default):
            sinks, rate, selected = (*rest, None)[:3]
            entries = other
        else:
            sinks = rest[1]
        sinks = as_float32(self.module, marker, "sinks", sinks)
        with graph.inserting_before(marker):
            number = self.layout.layers[layer]  # type: ignore[index]
            cache = call(graph, aten.select.int, self.inputs["k_cache"], 0, number)
            rows = call(graph, aten.select.int, tokens_first(graph, kv), 1, 0)
            write_keys(graph, rows, cache, self.inputs["slots"])
            kept = None if entries is None else self.entries(entries)
            options = (scale, window, rate, sinks, selected)
            attention = armllm.entry_attention.default
            out = call(graph, attention, tokens_first(graph, q), cache, kept, *self.steps, *options)
            result = call(graph, aten.unsqueeze.default, out, 0)
        self._replace(marker, result)

    def _replace(self, marker: Node, result: Node) -> None:
        marker.replace_all_uses_with(result)
        self.graph.erase_node(marker)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all attentions of a graph with entries; does nothing if the context is not paged."""
    attentions = entry_attentions(module)
    if not context.paged or not attentions:
        return 0
    layout = entry_layout(module)
    assert layout is not None
    first = OpCall(attentions[0]).kv
    dtype = context.cache_dtype or value(first).dtype
    caches = {"k_cache": (dtype, (len(layout.layers), 8, BLOCK_SIZE, layout.size))}
    for group, (size, rate) in enumerate(layout.groups):
        rows = most_per_block(BLOCK_SIZE, rate)
        caches[entries_name(group)] = (dtype, (layout.count(group), 8, rows, size))
    near = next(n for n in module.graph.nodes if n in {*attentions, *window_attentions(module)})
    inputs = add_paged_inputs(module, near, value(first).shape[2], caches)
    rewriting = _Rewriting(module, layout, inputs)
    for node in list(module.graph.nodes):
        if is_op(node, armllm.entry_selection.default):
            rewriting.select(node)
        elif is_op(node, armllm.attention_to_entries.default, armllm.attention.default):
            rewriting.attend(node)
    return len(attentions)  # no dead code is removed: no node reads the markers of compressors now
