"""A further plan of a patched model, which also returns the inputs of some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.state import patch_state
from torch_armllm.plan.step import Plan
from torch_armllm.quant.inspection import is_packed
from torch_armllm.system.default_dtype import Float32ByDefault


@Float32ByDefault()
def keep_layer_inputs(model: Any, layers: Sequence[int]) -> Plan:
    """Makes another plan of a patched model, which also returns the inputs of some layers.

    The model keeps its own plan, and both share the packed weights.

    Args:
        model: a patched model that runs a plan.
        layers: numbers of the layers, from 1 on.

    Returns:
        The plan; each row has the last hidden state, then the layers' inputs.

    Raises:
        CaptureError: the inputs are not in the model's graph.
    """
    state = patch_state(model)
    forward, kind = state.forward, state.kind
    assert forward is not None
    del kind.base.forward  # captured are the modules
    try:
        with torch.no_grad():
            built = build_plan(kind, is_packed(model), forward.shape.dtype, layers)
    finally:
        kind.base.forward = forward
    assert built.shape == forward.shape
    return built.plan
