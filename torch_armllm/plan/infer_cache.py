"""Inference of the KV cache's shape from a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.compression import entry_attentions
from torch_armllm.capture.markers.mla import is_latent_attention
from torch_armllm.kv_cache.shapes import (
    CacheShape,
    CompressedShape,
    EntryGroup,
    LatentShape,
    MixedShape,
    Shape,
    StatesOnlyShape,
    with_key_heads,
    with_state_sizes,
)
from torch_armllm.kv_cache.states import StateGroup, StateShape
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.cache_layout import CacheLayout
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.entry_layout import entry_layout
from torch_armllm.passes.lib.graph import is_op, value
from torch_armllm.passes.lib.index_keys import index_sizes
from torch_armllm.passes.lib.latents import find_latent_attention, latent_layout, not_absorbed_reason
from torch_armllm.passes.lib.paged_inputs import state_sizes
from torch_armllm.passes.lib.state_layout import state_layout


def cache_shape_of(
    base: nn.Module, module: fx.GraphModule, layout: CacheLayout, dtype: torch.dtype | None
) -> Shape:
    """Returns the shape of the paged cache, from the markers of a captured graph.

    Args:
        base: the captured module.
        module: its graph, before any pass.
        layout: position of each layer's keys and values.
        dtype: dtype of the cache; None: the dtype of the keys.

    Raises:
        CaptureError: the layers cannot share a cache, or no op supports their latents.
    """
    return replace(_kv_shape(base, module, layout, dtype), states=_state_shape(module))


def shape_of_rank(shape: Shape, module: fx.GraphModule, context: PassContext) -> Shape:
    """Returns the part of a cache that a tensor parallel rank keeps, from its rewritten graph."""
    if context.key_heads:
        shape = with_key_heads(shape, context.key_heads)
    return with_state_sizes(shape, state_sizes(module))


def _state_shape(module: fx.GraphModule) -> StateShape:
    layout = state_layout(module)
    return StateShape(tuple(StateGroup(layout.count(i), *kind) for i, kind in enumerate(layout.groups)))


def _kv_shape(
    base: nn.Module, module: fx.GraphModule, layout: CacheLayout, dtype: torch.dtype | None
) -> Shape:
    latent = _compressed_shape(module, dtype) or _latent_shape(base, module, dtype)
    if latent is not None:
        return latent
    nodes = [n for n in module.graph.nodes if is_op(n, torch.ops.armllm.attention.default)]
    if not nodes:
        output = next(n for n in module.graph.nodes if n.op == "output")
        (result,) = output.args
        return StatesOnlyShape(value(result).dtype)  # type: ignore[arg-type]
    key_dtypes = {value(OpCall(n).k).dtype for n in nodes}
    if len(key_dtypes) != 1:
        raise CaptureError("its layers differ in the dtype of their keys and values")
    cache_dtype = dtype or key_dtypes.pop()
    groups = [
        CacheShape(layout.count(i), kv_heads, head_size, value_size, cache_dtype)
        for i, (kv_heads, head_size, value_size) in enumerate(layout.sizes)
    ]
    indexers, index_size = _index_sizes(module)
    if indexers and not layout.uniform:
        raise CaptureError("it has indexers, and layers that differ in the shape of their keys and values")
    index_dtype = cache_dtype if cache_dtype.is_floating_point else value(OpCall(nodes[0]).k).dtype
    groups[-1] = replace(groups[-1], indexers=indexers, index_size=index_size, index_dtype=index_dtype)
    return _shape_of(groups, layout)


def _index_sizes(module: fx.GraphModule) -> tuple[int, int]:
    try:
        return index_sizes(module)
    except ValueError as reason:
        raise CaptureError(str(reason)) from None


def _compressed_shape(module: fx.GraphModule, dtype: torch.dtype | None) -> Shape | None:
    """Returns the shape of a cache of tokens and compressed entries; None if no layer attends to entries."""
    try:
        layout = entry_layout(module)
    except ValueError as reason:
        raise CaptureError(str(reason)) from None
    if layout is None:
        return None
    groups = tuple(EntryGroup(layout.count(i), *kind) for i, kind in enumerate(layout.groups))
    keys = value(OpCall(entry_attentions(module)[0]).kv)
    expanded = 2 * len(layout.layers) * layout.size
    return CompressedShape(
        len(layout.layers), layout.size, 0, dtype or keys.dtype, expanded=expanded, groups=groups
    )


def _latent_shape(base: nn.Module, module: fx.GraphModule, dtype: torch.dtype | None) -> Shape | None:
    """Returns the shape of a cache of latents; None if the graph has no latent attention."""
    attends = any(is_op(n, torch.ops.armllm.attention.default) for n in module.graph.nodes)
    if not attends or not any(is_latent_attention(part) for part in base.modules()):
        return None
    attentions = find_latent_attention(module)
    reason = not_absorbed_reason(module) if attentions else "it expands its latents in an unknown way"
    if reason is not None:
        raise CaptureError(reason)
    layers = {latent.layer: latent for latent in attentions}
    layout = latent_layout(attentions)
    own = value(OpCall(attentions[0].expansion).latent).dtype
    cache_dtype = dtype or own
    groups = []
    for group, (rank, rope_size) in enumerate(layout.sizes):
        members = [layer for layer, (of, _) in layout.positions.items() if of == group]
        expanded = sum(layers[layer].expanded for layer in members)
        groups.append(LatentShape(len(members), rank, rope_size, cache_dtype, expanded=expanded))
    indexers, index_size = _index_sizes(module)
    index_dtype = cache_dtype if cache_dtype.is_floating_point else own
    groups[-1] = replace(groups[-1], indexers=indexers, index_size=index_size, index_dtype=index_dtype)
    return _shape_of(groups, layout)


def _shape_of(groups: Sequence[CacheShape | LatentShape], layout: CacheLayout) -> Shape:
    if layout.uniform:
        return groups[0]
    return MixedShape(tuple(groups), tuple(layout.positions[layer] for layer in sorted(layout.positions)))
