"""Which layers of a model keep keys and values of the same shape, and which read those of another layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_armllm.passes.lib.graph import is_op, value


@dataclass(frozen=True)
class CacheLayout:
    """Where the layers of a paged cache lie.

    Layers are told by the numbers that the model gives to them.
    """

    sizes: tuple[tuple[int, int, int], ...]
    """kv heads, head size and value size of each group of layers"""
    places: dict[int, tuple[int, int]]
    """of each layer its group and its number in it; layers that share keys and values have the same"""

    def count(self, group: int) -> int:
        """Layers of a group whose keys and values are stored."""
        return len({place for place in self.places.values() if place[0] == group})

    @property
    def uniform(self) -> bool:
        """Whether there is one group, and every layer stores its own in the order of the layers."""
        return [self.places[layer] for layer in sorted(self.places)] == [
            (0, i) for i in range(len(self.places))
        ]


def cache_layout(module: fx.GraphModule) -> CacheLayout:
    """The layout for the attention markers of a captured graph, as they were before any pass."""
    sizes: list[tuple[int, int, int]] = []
    stored: dict[tuple[Any, Any], int] = {}
    owners: dict[int, int] = {}
    shapes: dict[int, tuple[int, int, int]] = {}
    for node in module.graph.nodes:
        if is_op(node, torch.ops.armllm.attention.default):
            keys, values, layer = node.args[1:4]
            owners[layer] = stored.setdefault((keys, values), layer)
            kv_heads, head_size, value_size = map(int, (*value(keys).shape[1::2], value(values).shape[3]))
            shapes[layer] = (kv_heads, head_size, value_size)
    counts: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for layer in sorted(owners, key=lambda n: (owners[n] != n, n)):
        if owners[layer] != layer:
            places[layer] = places[owners[layer]]
            continue
        if shapes[layer] not in sizes:
            sizes.append(shapes[layer])
            counts.append(0)
        group = sizes.index(shapes[layer])
        places[layer] = (group, counts[group])
        counts[group] += 1
    return CacheLayout(tuple(sizes), places)
