"""A patched model whose plan also returns the inputs of some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.step import Plan, StepInputs
from torch_armllm.quant.inspection import is_packed


class _FirstColumns:
    """A plan without the columns that follow the last hidden state."""

    def __init__(self, plan: Plan, columns: int) -> None:
        self._plan, self._columns = plan, columns

    def run(self, inputs: StepInputs) -> Tensor:
        """See `Plan.run`."""
        return self._plan.run(inputs)[:, : self._columns]


def keep_layer_inputs(model: Any, layers: Sequence[int]) -> Plan:
    """Replaces a patched model's plan by one that also returns the inputs of some layers.

    The model itself uses the new plan too, so that no weight that passes merged is stored twice.

    Args:
        model: a patched model that runs a plan.
        layers: numbers of the layers, from 1 on.

    Returns:
        The plan; each row has the last hidden state, then the layers' inputs.

    Raises:
        CaptureError: the inputs are not in the model's graph.
    """
    forward, base = patched_forward(model), base_model_of(model)
    assert forward is not None
    size = int(base.config.get_text_config().hidden_size)
    del base.forward  # captured are the modules
    try:
        with torch.no_grad():
            built = build_plan(model, is_packed(model), forward.shape.dtype, layers)
    finally:
        base.forward = forward
    assert built.shape == forward.shape
    forward.plan = _FirstColumns(built.plan, size)
    return built.plan
