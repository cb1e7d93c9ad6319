"""Layout of the states of recurrent layers: groups of equal shape, and each marker's position in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.recurrent_ops import markers_of
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import is_op, value

armllm = torch.ops.armllm


class StateKind(NamedTuple):
    """Shape and dtype of a state, and whether it sums over all tokens, as a convolution's does not."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    accumulates: bool


@dataclass(frozen=True)
class StateLayout:
    """Positions of the states of a graph's recurrent markers, which are identified by their order."""

    groups: tuple[StateKind, ...]
    """The states of each group."""
    positions: tuple[tuple[int, int], ...]
    """Group of each marker's state, and its index in the group."""

    def count(self, group: int) -> int:
        """Returns the number of states of a group."""
        return sum(number == group for number, _ in self.positions)


def state_layout(module: fx.GraphModule) -> StateLayout:
    """Returns the layout for the recurrent markers of a captured graph, before any pass."""
    groups: list[StateKind] = []
    counts: list[int] = []
    positions: list[tuple[int, int]] = []
    for node in markers_of(module):
        state = _state_of(node)
        if state not in groups:
            groups.append(state)
            counts.append(0)
        group = groups.index(state)
        positions.append((group, counts[group]))
        counts[group] += 1
    return StateLayout(tuple(groups), tuple(positions))


def _state_of(node: Node) -> StateKind:
    """Returns the state of a marker."""
    inputs = node.all_input_nodes
    if is_op(node, armllm.convolve_tokens):
        channels, taps = map(int, value(inputs[1]).shape)
        return StateKind((taps - 1, channels), value(inputs[0]).dtype, accumulates=False)
    if is_op(node, armllm.scan_channels):
        states, channels = map(int, value(OpCall(node).a).shape)
        return StateKind((states, channels), torch.float32, accumulates=True)
    if is_op(node, armllm.window_entries):
        kv, bias = value(OpCall(node).kv), value(OpCall(node).bias)
        width, rate = int(kv.shape[2]), int(bias.shape[0])
        span = rate * (width // int(value(node).shape[2]))
        return StateKind((span - 1, 2 * width), kv.dtype, accumulates=False)
    keys, values = value(OpCall(node).k).shape, value(OpCall(node).v).shape
    sizes = int(values[2]), int(keys[3]), int(values[3])
    return StateKind(sizes, torch.float32, accumulates=True)
