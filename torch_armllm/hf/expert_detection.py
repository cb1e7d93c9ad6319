"""Detection of experts modules: weights by their declared layout, activations by numerical comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.hf.expert_probing import FAR, candidates, recognize_undecorated
from torch_armllm.ops.activation import FUNCTIONS


def is_decorated(module: nn.Module) -> bool:
    """True if transformers' ``use_experts_implementation`` decorates the module's class."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in flags)


def is_experts(module: nn.Module) -> bool:
    """True if a module holds the weights of several experts, with transformers' interface or without."""
    pair = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return is_decorated(module) or all(isinstance(w, Tensor) and w.dim() == 3 for w in pair)


def read_layout(module: nn.Module) -> ExpertLayout | str:
    """Returns the layout of an experts module, or the reason for which the fused op does not support it."""
    if not is_decorated(module):
        return recognize_undecorated(module) or "what it computes is not what a fused op does"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several processes"
    if getattr(module, "has_post_expert_norm", False):
        return "experts followed by a norm of their own have no fused op"
    layout = ExpertLayout(
        bool(module.is_transposed),
        not module.is_concatenated,
        bool(module.has_bias),
        "silu",
        gated=bool(module.has_gate),
    )
    missing = [name for name in layout.weights if not isinstance(getattr(module, name, None), Tensor)]
    if missing:
        return f"it has no parameter {missing[0]}"
    activation = _recognize(module, layout.gated)
    if activation is None:
        return "its activation has no fused op"
    name, limit, up_limit = activation
    return replace(layout, activation=name, limit=limit, up_limit=up_limit)


def _recognize(module: nn.Module, gated: bool) -> tuple[str, float, float] | None:
    """Identifies the activation by its values: class names are not enough."""
    points = torch.cat([torch.linspace(-12.0, 12.0, 97), torch.tensor([*FAR, *(-x for x in FAR)])]).double()
    if gated:
        gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
        # one pair per row: interleaved and concatenated are the same
        function: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
        joined = torch.stack([gate, up], dim=-1)
    else:
        function, gate, up, joined = module.act_fn, points, points, points[:, None]  # type: ignore[assignment]
    try:
        with torch.no_grad():
            actual = function(joined)[..., 0]
    except Exception:  # noqa: BLE001 - the op does not support gates with another signature
        return None
    for name, limit, up_limit in candidates(module):
        expected = FUNCTIONS[name](gate, up, limit, up_limit)
        # float32 activations lose digits in their tails, and up multiplies the error
        if bool(((actual - expected).abs() <= 1e-5 * (1 + expected.abs() + up.abs())).all()):
            return name, limit, up_limit
    return None
