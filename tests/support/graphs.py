"""Small graphs for tests of the passes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.export import weights_as_attributes


def export(module: nn.Module, *args: Tensor, tokens_dim: int = 1) -> fx.GraphModule:
    """Returns a module's ATen graph with weights as attributes and a dynamic number of tokens."""
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    shapes = tuple({tokens_dim: tokens} for _ in args)
    with torch.no_grad():
        program = torch.export.export(module.eval(), args, dynamic_shapes=shapes, strict=False)
    return weights_as_attributes(program).graph_module


def ops(module: fx.GraphModule) -> list[str]:
    """Returns the names of a graph's operators in order, without sizes and tuple items."""
    names = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        schema: Any = getattr(node.target, "_schema", None)
        name = schema.name if schema is not None else str(node.target)
        if "sym_size" not in name and "_assert" not in name:
            names.append(name.replace("aten::", ""))
    return names
