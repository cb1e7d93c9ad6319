"""Additions of adapters to some columns of a layer's result, which are those that a rank computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.lora.block_columns import Columns, empty_columns
from torch_armllm.passes.lib.graph import call, constant, is_op, new_constant

lora_linear = torch.ops.armllm.lora_linear.default
_KEY = "adapter_columns"


@dataclass(frozen=True)
class AdapterColumns:
    """Columns of the second factors of a layer's adapters that a rank has.

    Attributes:
        name: attribute of the second factors of all columns, or the model's name for it.
        columns: begin and end of each range.
        factors: memory for those of the rank.
    """

    name: str
    columns: Columns
    factors: Tensor


def add_to_columns(module: fx.GraphModule, node: Node, base: Node, columns: Columns) -> Node:
    """Inserts the addition of a layer's adapters to some columns, at the graph's insertion point.

    Args:
        module: to change.
        node: the addition to all columns.
        base: those columns of the layer's result.
        columns: begin and end of each range, which are whole blocks of the factors.
    """
    _, x, a, b, ranks, adapters = node.args
    whole = constant(module, b)
    assert whole is not None and isinstance(b, Node), f"{b} is no constant"
    own = empty_columns(whole, columns)
    factors = new_constant(module, node, f"{b.target}_rank", own)
    added = call(module.graph, lora_linear, base, x, a, factors, ranks, adapters)
    added.meta[_KEY] = AdapterColumns(str(b.target), columns, own)
    return added


def adapter_columns(module: fx.GraphModule) -> Iterator[AdapterColumns]:
    """Yields what a rank has of the layers whose columns are sharded."""
    for node in module.graph.nodes:
        if is_op(node, lora_linear) and _KEY in node.meta:
            yield node.meta[_KEY]
