"""Layout of the paged KV cache: groups of layers by shape, and layers that share keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_armllm.capture.markers.attention import ahead_of
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import CONVERSIONS, is_op, value


@dataclass(frozen=True)
class CacheLayout:
    """Positions of the layers in a paged cache; layers are identified by their ``layer_idx``."""

    sizes: tuple[tuple[int, ...], ...]
    """KV heads, head size and value size of each group of layers; of latents: rank and rope size."""
    positions: dict[int, tuple[int, int]]
    """Group of each layer, and its index in the group; layers that share keys and values share a position."""

    def count(self, group: int) -> int:
        """Returns the number of cache layers of a group."""
        return len({position for position in self.positions.values() if position[0] == group})

    @property
    def uniform(self) -> bool:
        """True if there is one group, and each layer has its own cache layer, in the order of the layers."""
        return [self.positions[layer] for layer in sorted(self.positions)] == [
            (0, i) for i in range(len(self.positions))
        ]


def cache_layout(module: fx.GraphModule) -> CacheLayout:
    """Returns the layout for the attention markers of a captured graph, before any pass.

    Layers whose tokens attend to later ones share a position, as no later step reads what they write.
    """
    stored: dict[tuple[Any, ...], int] = {}
    owners: dict[int, int] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for node in module.graph.nodes:
        if is_op(node, torch.ops.armllm.attention.default):
            attention = OpCall(node)
            keys, values, layer = _unconverted(attention.k), _unconverted(attention.v), attention.layer
            kv_heads, head_size, value_size = map(int, (*value(keys).shape[1::2], value(values).shape[3]))
            shapes[layer] = (kv_heads, head_size, value_size)
            owners[layer] = stored.setdefault(shapes[layer] if ahead_of(node) else (keys, values), layer)
    return layout_of(shapes, owners)


def _unconverted(node: Any) -> fx.Node:
    """Returns what a node converts to the dtype and device that it has, as older releases do; or the node."""
    while is_op(node, *CONVERSIONS):
        source = OpCall(node).self
        before, after = value(source), value(node)
        if (before.dtype, before.device) != (after.dtype, after.device):
            break
        node = source
    assert isinstance(node, fx.Node)
    return node


def layout_of(shapes: Mapping[int, tuple[int, ...]], owners: Mapping[int, int]) -> CacheLayout:
    """Returns the layout of layers.

    Args:
        shapes: sizes of each layer's part of the cache.
        owners: the layer whose part a layer reads and writes: its own, or an earlier one's.
    """
    sizes: list[tuple[int, ...]] = []
    counts: list[int] = []
    positions: dict[int, tuple[int, int]] = {}
    for layer in sorted(owners, key=lambda n: (owners[n] != n, n)):
        if owners[layer] != layer:
            positions[layer] = positions[owners[layer]]
            continue
        if shapes[layer] not in sizes:
            sizes.append(shapes[layer])
            counts.append(0)
        group = sizes.index(shapes[layer])
        positions[layer] = (group, counts[group])
        counts[group] += 1
    return CacheLayout(tuple(sizes), positions)
