"""Attentions on expanded latents (MLA) of a captured graph, and the layout of their cache."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.probing import module_name
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.cache_layout import CacheLayout, layout_of
from torch_armllm.passes.lib.graph import is_op, value

armllm = torch.ops.armllm
_OF_LATENTS = {"q", "k", "v", "layer", "scale", "window", "sinks", "selected"}
"""Arguments of attention that `mla_attention` has, too."""


@dataclass(frozen=True)
class LatentAttention:
    """An attention marker whose keys and values are expanded latents."""

    attention: Node
    expansion: Node

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return int(OpCall(self.attention).layer)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of a latent, and of the rotated part of a key."""
        expansion = OpCall(self.expansion)
        return int(value(expansion.latent).shape[-1]), int(value(expansion.k_rope).shape[-1])

    @property
    def expanded(self) -> int:
        """Elements of a token's expanded keys and values."""
        heads, nope_size, value_size = self.up
        return heads * (nope_size + self.sizes[1] + value_size)

    @property
    def up(self) -> tuple[int, int, int]:
        """Number of heads, elements of a key without position, and elements of a value."""
        expansion = OpCall(self.expansion)
        return int(expansion.heads), int(expansion.nope_size), int(expansion.value_size)


def find_latent_attention(module: fx.GraphModule) -> list[LatentAttention]:
    """Returns all attentions on expanded latents of a graph."""
    attentions = []
    for node in module.graph.nodes:
        if not is_op(node, armllm.attention.default):
            continue
        parts = [OpCall(x) for x in (OpCall(node).k, OpCall(node).v) if is_op(x, operator.getitem)]
        if len(parts) == 2 and all(is_op(part.source, armllm.expand_kv.default) for part in parts):
            attentions.append(LatentAttention(node, parts[0].source))
    return attentions


def not_absorbed_reason(module: fx.GraphModule) -> str | None:
    """Returns why a graph's latent attention cannot run absorbed; None if it can, or if there is none."""
    attentions = find_latent_attention(module)
    if not attentions:
        return None
    latent_nodes = {latent.attention for latent in attentions}
    first = attentions[0]
    for node in module.graph.nodes:
        if is_op(node, armllm.attention.default) and node not in latent_nodes:
            return (
                f"{module_name(node)} caches keys and values, and {module_name(first.attention)} latents; "
                "the cache of a plan with latents has no keys and values"
            )
    for latent in attentions:
        name = module_name(latent.attention)
        attention = OpCall(latent.attention)
        if others := attention.given - _OF_LATENTS:
            return f"{name} has latent attention with a {min(others)}, which no fused op has"
        if attention.window and attention.selected is not None:
            return f"{name} attends to selected tokens in a sliding window, which no fused op does"
    return None


def latent_layout(attentions: list[LatentAttention]) -> CacheLayout:
    """Returns the layout of the latents' cache: layers of equal sizes are a group."""
    sizes = {latent.layer: latent.sizes for latent in attentions}
    return layout_of(sizes, {layer: layer for layer in sizes})
