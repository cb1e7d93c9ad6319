"""Removal of constants that no result depends on."""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.passes.lib.graph import aten, drop_unused


def chain(length: int, used: bool) -> fx.GraphModule:
    """Returns a graph in which each node is read twice by the next, from the constant ``w`` on."""
    module = torch.nn.Module()
    module.register_buffer("w", torch.ones(2))
    graph = fx.Graph()
    x, node = graph.placeholder("x"), graph.get_attr("w")
    for _ in range(length):
        node = graph.call_function(
            aten.add.Tensor, (node, graph.call_function(aten.mul.Tensor, (node, node)))
        )
    graph.output(node if used else x)
    return fx.GraphModule(module, graph)


def test_a_constant_of_a_deep_graph_is_kept_while_it_is_used() -> None:
    module = chain(2000, used=True)
    drop_unused(module, "w")
    assert hasattr(module, "w")
    assert len(module.graph.nodes) == 2 * 2000 + 3


def test_a_constant_and_its_readers_are_removed_if_no_result_depends_on_them() -> None:
    module = chain(2000, used=False)
    drop_unused(module, "w")
    assert not hasattr(module, "w")
    assert [n.op for n in module.graph.nodes] == ["placeholder", "output"]
