"""The experts seam: transformers' float experts as one marker op, which can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMPLEMENTATION = "armllm"

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define(
    "experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, str activation)"
    " -> Tensor"
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class UnsupportedExperts(RuntimeError):
    """The experts have a layout or gate that the marker op cannot express."""


def float_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Weighted sum of gated experts, one expert after the other.

    Args:
        x: tokens, ``(T, hidden)``.
        expert_ids: ``(T, top_k)`` integers.
        expert_weights: ``(T, top_k)``.
        gate_up: ``(experts, 2 * intermediate, hidden)``, gate rows first.
        down: ``(experts, hidden, intermediate)``.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``relu``.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``.
    """
    act = _ACTIVATIONS[activation]
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        if token.numel() == 0:
            continue
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(act(gate) * up, down[expert])
        part = part * expert_weights[token, slot, None]
        out.index_add_(0, token, part.to(out.dtype))
    return out


def _fake(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    return torch.empty_like(x)


_library.impl("experts", float_experts, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::experts", _fake, lib=_library)


def activation_name(module: nn.Module) -> str | None:
    """The kernel's name of the activation of an MLP or experts module, or None if no kernel has it."""
    act = getattr(module, "act_fn", None)
    name = type(act).__name__
    if name in ("SiLUActivation", "SiLU"):
        return "silu"
    if name in ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"):
        return "gelu_tanh"
    if name in ("GELUActivation", "GELU"):
        return "gelu_tanh" if getattr(act, "approximate", "none") == "tanh" else "gelu"
    if name == "ReLU":
        return "relu"
    return None


def has_plain_layout(module: nn.Module) -> bool:
    """Whether an experts module is the plain one: [gate; up] rows, act(gate) · up, no biases."""
    from transformers.integrations.moe import _default_apply_gate

    return (
        bool(getattr(module, "has_gate", False))
        and bool(getattr(module, "is_concatenated", False))
        and not getattr(module, "is_transposed", False)
        and not getattr(module, "has_bias", False)
        and not getattr(module, "has_post_expert_norm", False)
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and activation_name(module) is not None
    )


def experts_function(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    """What transformers calls in place of its own experts while a model is captured."""
    name = activation_name(module)
    if name is None or not has_plain_layout(module):
        raise UnsupportedExperts(f"{type(module).__name__} has a layout or gate of its own")
    return torch.ops.armllm.experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, name
    )


def register() -> None:
    """Makes the seam known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)
