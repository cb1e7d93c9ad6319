"""The paged cache that a captured graph needs."""

from __future__ import annotations

import torch
from torch import fx, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.mla import expands_latents
from torch_armllm.kv_cache.shapes import CacheShape, LatentShape, MixedShape, Shape
from torch_armllm.passes.lib.cache_layout import CacheLayout
from torch_armllm.passes.lib.graph import is_op, value
from torch_armllm.passes.mla import find_latent, why_not_absorbed


def cache_shape_of(
    base: nn.Module, module: fx.GraphModule, layout: CacheLayout, dtype: torch.dtype | None
) -> Shape:
    """Sizes of the paged cache, from the graph's attentions before they are rewritten.

    Args:
        base: the captured module.
        module: its graph.
        layout: which layer's keys and values lie where.
        dtype: of the cache; None: the model's own.

    Raises:
        CaptureError: its layers have no cache in common, or latents that no op knows.
    """
    latent = _latent_shape(base, module, dtype)
    if latent is not None:
        return latent
    nodes = [n for n in module.graph.nodes if is_op(n, torch.ops.armllm.attention.default)]
    own = {value(n.args[1]).dtype for n in nodes}
    if len(own) != 1:
        raise CaptureError("its layers differ in the dtype of their keys and values")
    holds = dtype or own.pop()
    groups = tuple(CacheShape(layout.count(i), *sizes, holds) for i, sizes in enumerate(layout.sizes))
    if layout.uniform:
        return groups[0]
    return MixedShape(groups, tuple(layout.places[layer] for layer in sorted(layout.places)))


def _latent_shape(base: nn.Module, module: fx.GraphModule, dtype: torch.dtype | None) -> LatentShape | None:
    """Sizes of a cache of latents; None where the model's layers have none."""
    if not any(expands_latents(part) for part in base.modules()):
        return None
    found = find_latent(module)
    reason = why_not_absorbed(module) if found else "its latents are expanded in a way that is not known"
    if reason is not None:
        raise CaptureError(reason)
    layers = {latent.attention.args[3]: latent for latent in found}
    own = value(found[0].expansion.args[0]).dtype  # type: ignore[arg-type]
    expanded = sum(latent.expanded for latent in layers.values())
    return LatentShape(len(layers), *found[0].sizes, dtype or own, expanded=expanded)
