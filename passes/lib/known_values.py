"""Values that operators compute of constants alone, before `fold_constants` makes them constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant

MAX_VALUES = 1 << 16


@torch.no_grad()
def known_value(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Returns a constant, or what operators of PyTorch make of constants; None if it depends on an input."""
    tensor = constant(module, node)
    if tensor is not None or not isinstance(node, Node) or node.op != "call_function":
        return tensor
    result, inputs = node.meta.get("val"), node.all_input_nodes
    if not inputs or not isinstance(result, Tensor) or not _is_small(result):
        return None
    if getattr(node.target, "namespace", "") != "aten" or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return None
    values = {each: known_value(module, each) for each in inputs}
    if any(each is None for each in values.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    found: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def _is_small(result: Tensor) -> bool:
    return all(isinstance(size, int) for size in result.shape) and result.numel() <= MAX_VALUES
