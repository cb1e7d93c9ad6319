"""Markers of indexers in a graph, and the keys that indexers keep in a cache."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import aten, call, is_op, value

MARKERS = (torch.ops.armllm.selection.default, torch.ops.armllm.block_selection.default)
"""Markers whose second operand is a key of each token."""


def selections(module: fx.GraphModule, *markers: Any) -> list[Any]:
    """Returns the markers of a graph's indexers; only those of some ops, if any are given."""
    return [n for n in module.graph.nodes if is_op(n, *(markers or MARKERS))]


def index_sizes(module: fx.GraphModule) -> tuple[int, int]:
    """Returns the number of indexers of a graph, and the elements of their keys; zeros without indexers.

    Raises:
        ValueError: the indexers differ in the sizes of their keys.
    """
    found = selections(module)
    sizes = {int(value(OpCall(node).k).shape[-1]) for node in found}
    if len(sizes) > 1:
        raise ValueError(f"its indexers differ in the sizes of their keys: {sorted(sizes)}")
    return len(found), sizes.pop() if sizes else 0


def write_keys(graph: fx.Graph, keys: Any, cache: Node, slots: Node) -> None:
    """Adds the op that stores keys ``(T, size)`` in a cache ``(blocks, block size, size)``."""
    middle = int(value(keys).shape[-1]) // 2
    parts = (call(graph, aten.slice.Tensor, keys, -1, *ends) for ends in ((0, middle), (middle, sys.maxsize)))
    call(graph, torch.ops.armllm.mla_write.default, *parts, cache, slots)
