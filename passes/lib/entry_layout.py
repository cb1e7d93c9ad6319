"""Layout of a cache of tokens and of compressed entries, from the markers of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.compression import entry_attentions
from torch_armllm.capture.probing import module_name
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import is_op, value

armllm = torch.ops.armllm
_OF_A_WINDOW = {"q", "k", "v", "layer", "scale", "window", "sinks"}
"""Arguments of attention that `entry_attention` has, too."""

PLACE = "entries"
"""Metadata of a compressor's marker, which the pass of attention sets: its group and its number in it."""


def entries_name(group: int) -> str:
    """Returns the name of a group of compressors' input."""
    return f"entries_{group}"


@dataclass(frozen=True)
class EntryLayout:
    """Places of the layers' tokens and of the compressors' entries."""

    size: int
    """Elements of a token's key, which is its value too."""
    layers: dict[int, int]
    """Number of each layer in the cache of tokens."""
    groups: tuple[tuple[int, int], ...]
    """Elements of an entry, and tokens that it stands for, of each group of compressors."""
    places: tuple[tuple[int, int], ...]
    """Group of each compressor, in the order of their markers, and its number in the group."""

    def count(self, group: int) -> int:
        """Returns the number of compressors of a group."""
        return sum(number == group for number, _ in self.places)


def compressors_of(module: fx.GraphModule) -> list[Node]:
    """Returns the markers of compressors, in order."""
    return [n for n in module.graph.nodes if is_op(n, armllm.window_entries.default)]


def window_attentions(module: fx.GraphModule) -> list[Node]:
    """Returns the markers of attention without entries, in order."""
    return [n for n in module.graph.nodes if is_op(n, armllm.attention.default)]


def entry_layout(module: fx.GraphModule) -> EntryLayout | None:
    """Returns the layout; None if a graph has no attention to entries.

    Raises:
        ValueError: its layers cannot share a cache; the message says why.
    """
    with_entries = entry_attentions(module)
    if not with_entries:
        return None
    size = int(value(OpCall(with_entries[0]).kv).shape[3])
    numbers = [int(OpCall(n).layer) for n in with_entries]
    for node in window_attentions(module):
        attention, name = OpCall(node), module_name(node)
        if attention.k is not attention.v or tuple(value(attention.k).shape[1::2]) != (1, size):
            raise ValueError(f"{name} caches other keys and values than those of layers with compressed keys")
        if not attention.window or attention.given - _OF_A_WINDOW:
            raise ValueError(f"{name} attends beside layers with compressed keys, and not to a window alone")
        numbers.append(int(attention.layer))
    if any(value(OpCall(n).kv).shape[3] != size for n in with_entries):
        raise ValueError("its layers with compressed keys differ in the size of their keys")
    groups: list[tuple[int, int]] = []
    counts: list[int] = []
    places: list[tuple[int, int]] = []
    for node in compressors_of(module):
        kind = int(value(node).shape[2]), int(value(OpCall(node).bias).shape[0])
        if kind not in groups:
            groups.append(kind)
            counts.append(0)
        group = groups.index(kind)
        places.append((group, counts[group]))
        counts[group] += 1
    layers = {layer: number for number, layer in enumerate(sorted(numbers))}
    return EntryLayout(size, layers, tuple(groups), tuple(places))
