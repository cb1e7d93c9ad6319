"""Marker op of float experts, and the function that inserts it through transformers' interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_armllm.capture.markers.declare import marker
from torch_armllm.hf.expert_detection import is_decorated, is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.hf.replacements import replaced
from torch_armllm.ops.activation import FUNCTIONS
from torch_armllm.ops.declare import reference
from torch_armllm.ops.untraced import untraced

IMPLEMENTATION = "armllm"
_FALLBACK = "grouped_mm"
"""transformers' own capturable implementation, for experts that the marker op cannot express."""


@marker(
    "experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, str activation,"
    " float limit=7.0, Tensor? gate_up_bias=None, Tensor? down_bias=None, bool gated=True,"
    " bool transposed=False, bool interleaved=False, int identity_experts=0, float up_limit=7.0) -> Tensor",
    lambda a: torch.empty_like(a.x),
)
@reference("experts")
def float_experts(a: Any) -> Tensor:
    """Computes the weighted sum of experts, one expert after the other.

    Arguments of the marker op:
        x: tokens, ``(T, hidden)``.
        expert_ids: ``(T, top_k)`` integers.
        expert_weights: ``(T, top_k)``.
        gate_up: ``(experts, 2 * intermediate, hidden)``, gate rows first;
            ``(experts, intermediate, hidden)`` without a gate.
        down: ``(experts, hidden, intermediate)``.
        activation: name of an activation in ``ACTIVATIONS``.
        limit: bound of the activations that clamp, and of the gate in ``silu_softcapped``.
        gate_up_bias: ``(experts, 2 * intermediate)``, in the order of ``gate_up``'s rows.
        down_bias: ``(experts, hidden)``.
        gated: True if there is a gate; otherwise the activation receives ``up`` twice.
        transposed: True if the last two dimensions of the weights are swapped.
        interleaved: True if gate and up rows alternate.
        identity_experts: number of ids after those of ``down`` for which a token itself is the result.
        up_limit: bound of up in ``silu_softcapped``.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``.
    """
    layout = expert_layout(a)
    parts, downs = layout.inner(a.gate_up), layout.outer(a.down)
    biases = None if a.gate_up_bias is None else layout.inner_bias(a.gate_up_bias)
    out = torch.zeros_like(a.x)
    for expert, outer in enumerate(downs):
        token, slot = torch.where(a.expert_ids == expert)
        if token.numel() == 0:
            continue
        rows = [F.linear(a.x[token], part[expert]) for part in parts]
        if biases is not None:
            rows = [row + bias for row, bias in zip(rows, biases[expert].view(len(rows), -1), strict=True)]
        inner = FUNCTIONS[a.activation](rows[0], rows[-1], a.limit, a.up_limit)
        part = F.linear(inner, outer, None if a.down_bias is None else a.down_bias[expert])
        part = part * a.expert_weights[token, slot, None]
        out.index_add_(0, token, part.to(out.dtype))
    for expert in range(len(downs), len(downs) + a.identity_experts):
        token, slot = torch.where(a.expert_ids == expert)
        out.index_add_(0, token, (a.x[token] * a.expert_weights[token, slot, None]).to(out.dtype))
    return out


def expert_layout(a: Any) -> ExpertLayout:
    """Returns the layout that the marker op's arguments describe, which ``a`` has by name."""
    return ExpertLayout(
        transposed=a.transposed,
        interleaved=a.interleaved,
        biased=a.gate_up_bias is not None,
        activation=a.activation,
        limit=a.limit,
        gated=a.gated,
        identity_experts=a.identity_experts,
        up_limit=a.up_limit,
    )


def experts_function(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    """Inserts the marker op; transformers calls this instead of its own experts during capture.

    Experts that the marker op cannot express are traced as transformers computes them.
    """
    with untraced():  # detection runs the module's activation, which must not be traced
        layout = read_layout(module)
    if isinstance(layout, str):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS[_FALLBACK](module, hidden_states, top_k_index, top_k_weights)
    return _marked(module, layout, hidden_states, top_k_index, top_k_weights)


def _marked(module: Any, layout: ExpertLayout, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Calls the marker op for a module."""
    inner, outer = (getattr(module, name) for name in layout.weights)
    biases = (getattr(module, f"{name}_bias") if layout.biased else None for name in layout.weights)
    out: Tensor = torch.ops.armllm.experts(
        x,
        ids,
        weights,
        inner,
        outer,
        layout.activation,
        layout.limit,
        *biases,
        layout.gated,
        layout.transposed,
        layout.interleaved,
        layout.identity_experts,
        layout.up_limit,
    )
    return out


def _batched_forward(module: Any, layout: ExpertLayout) -> Callable[[Tensor], Tensor]:
    """Returns the replacement of ``forward`` for experts whose input has rows for every expert."""

    def forward(hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(-1, module.down_proj.shape[1 if not layout.transposed else 2])
        count = module.down_proj.shape[0]
        ids = torch.arange(count)[:, None].expand(count, rows.shape[0] // count).reshape(-1, 1)
        return _marked(module, layout, rows, ids, torch.ones_like(ids, dtype=rows.dtype))

    return forward


def mark_undecorated_experts(model: nn.Module) -> AbstractContextManager[None]:
    """Replaces float experts outside transformers' interface (Llama 4, LongCat) by the marker op."""
    return replaced(model, "forward", _undecorated_forward)


def _undecorated_forward(module: nn.Module) -> Callable[..., Any] | None:
    layout = read_layout(module) if is_experts(module) and not is_decorated(module) else ""
    if not isinstance(layout, ExpertLayout):
        return None
    return _batched_forward(module, layout) if layout.batched else partial(_marked, module, layout)


def register() -> None:
    """Registers the experts function with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)
