"""Further results of a captured graph: the inputs of some decoder layers, which EAGLE-3 drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_armllm.capture.output_check import run_model
from torch_armllm.capture.sample import Sample
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.passes.lib.graph import call

_LARGEST_ERROR = 0.1
"""Largest error of a node that counts as a layer's input, relative to what the modules compute."""


class _Closest(fx.Interpreter):
    """Finds the nodes whose results are closest to given tensors."""

    def __init__(self, module: fx.GraphModule, expected: Sequence[Tensor]) -> None:
        super().__init__(module)
        self._expected = expected
        self.errors = [float("inf")] * len(expected)
        self.nodes: list[fx.Node | None] = [None] * len(expected)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor) and result.is_floating_point():
            for number, tensor in enumerate(self._expected):
                if result.shape == tensor.shape:
                    error = float((result.float() - tensor.float()).norm() / tensor.float().norm())
                    if error < self.errors[number]:
                        self.errors[number], self.nodes[number] = error, n
        return result


@torch.no_grad()
def append_layer_inputs(
    kind: ModelKind, module: fx.GraphModule, sample: Sample, layers: Sequence[int]
) -> Sample | None:
    """Appends the inputs of decoder layers to the last hidden state, along its last dimension.

    The nodes are those that compute what the modules pass from layer to layer, whatever the export made of
    the modules.

    Args:
        kind: of the captured model.
        module: its graph, which is changed.
        sample: of the graph's results.
        layers: numbers of the layers, from 1 on.

    Returns:
        The sample of the longer rows; None if a layer's input is not among the graph's nodes.
    """
    _, outputs = run_model(kind, sample.input_ids)
    closest = _Closest(module, [outputs[layer - 1] for layer in layers])
    closest.run(sample.input_ids, sample.position_ids)
    if not all(error < _LARGEST_ERROR for error in closest.errors):
        return None
    output = next(n for n in module.graph.nodes if n.op == "output")
    with module.graph.inserting_before(output):
        joined = call(module.graph, torch.ops.aten.cat.default, [*output.all_input_nodes, *closest.nodes], -1)
    output.args = (joined,)
    module.graph.lint()
    module.recompile()
    return replace(sample, hidden=module(sample.input_ids, sample.position_ids)[0].float())
