"""Decomposed tanh-GELU, as in GPT-2 and Phi, becomes ``aten.gelu``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, only_user, value
from torch_armllm.passes.lib.probe import regions

_POINTS = torch.linspace(-6.0, 6.0, 96)


def _last(tanh: Node) -> Node | None:
    """Returns the product of ``… · (1 + tanh(…))``."""
    plus = only_user(tanh)
    if plus is None or not is_op(plus, aten.add.Tensor):
        return None
    product = only_user(plus)
    return product if product is not None and is_op(product, aten.mul.Tensor) else None


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all subgraphs that compute tanh-GELU."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, aten.tanh.default):
            continue
        last = _last(node)
        if last is None:
            continue
        for region in regions((last,)):
            entry = region.entry
            if tuple(value(entry).shape) != tuple(value(last).shape):
                continue
            try:
                (result,) = region.values(module, _POINTS.view(1, 1, -1))
            except Exception:  # noqa: BLE001 - a region that cannot run on three dimensions is not a GELU
                break
            if torch.allclose(result.flatten(), F.gelu(_POINTS, approximate="tanh"), atol=1e-4):
                with graph.inserting_before(last):
                    last.replace_all_uses_with(call(graph, aten.gelu.default, entry, approximate="tanh"))
                num_rewritten += 1
                break
    graph.eliminate_dead_code()
    return num_rewritten
