"""Rows of hidden states that a step is given beside its token ids: an input of draft layers.

Encoders are given types of their tokens in the same way, see `token_types`.

A captured graph has inputs for ids and positions only, so the further input is a marker op.  Its rows are a
fixed function of the ids, which lets every check of a graph run as on other models; a plan reads what its
step is given in their place.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_armllm.capture.markers.declare import marker
from torch_armllm.capture.markers.token_types import sample_types
from torch_armllm.ops.op_call import OpCall


@marker(
    "given_rows(Tensor input_ids, int columns, ScalarType dtype) -> Tensor",
    lambda a: a.input_ids.new_empty((*a.input_ids.shape, a.columns), dtype=a.dtype),
)
def sample_rows(input_ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns rows ``(1, T, columns)`` that are functions of the token ids ``(1, T)``."""
    phases = torch.arange(1, columns + 1, dtype=torch.float64) * 0.618034
    return torch.sin((input_ids[..., None] + 1).double() * phases).to(dtype)


def sample_of(module: fx.GraphModule, input_ids: Tensor) -> Tensor | None:
    """Returns the rows ``(T, columns)`` or types ``(T,)`` that a graph is given in checks; None if none."""
    for node in _given(module.graph):
        call = OpCall(node)
        if node.target is torch.ops.armllm.token_types.default:
            return sample_types(input_ids, call.count)[0]
        return sample_rows(input_ids, call.columns, call.dtype)[0]
    return None


def given_as_input(module: fx.GraphModule) -> bool:
    """Makes what a graph is given its last input: rows ``(1, T, columns)`` or types ``(1, T)``.

    Returns:
        False if it is given nothing.
    """
    markers, graph = _given(module.graph), module.graph
    if not markers:
        return False
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        given = graph.placeholder("given")
    for node in markers:
        node.replace_all_uses_with(given)
        graph.erase_node(node)
    module.recompile()
    return True


def _given(graph: fx.Graph) -> list[fx.Node]:
    """Returns the markers of a graph that stand for what a step is given."""
    targets = (torch.ops.armllm.token_types.default, torch.ops.armllm.given_rows.default)
    return [node for node in graph.nodes if node.target in targets]
