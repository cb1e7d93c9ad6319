"""Reference of the MoE op: slow plain PyTorch, one expert at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import reference
from torch_armllm.ops.linear.reference import activate, reference_int4_linear
from torch_armllm.ops.moe.int4_moe_lora import ExpertAdapters


@reference("int4_moe")
def reference_int4_moe(a: Any) -> Tensor:
    """Reference of :func:`int4_moe`, equal to it except for the last bits of the activation function.

    Such a bit can change an intermediate value by one INT8 step, so outputs agree to about one percent of the
    largest output.  With ``relu`` and an exact scheme they agree to float32 rounding.
    """
    return _experts(a, None, a.weigh_input)


@reference("int4_moe_lora")
def reference_int4_moe_lora(a: Any) -> Tensor:
    """Reference of the op behind :func:`int4_moe_lora`, of which `ExpertAdapters` are seven arguments."""
    return _experts(a, ExpertAdapters(*(getattr(a, name) for name in ExpertAdapters._fields)), False)


def _experts(a: Any, adapters: ExpertAdapters | None, weigh_input: bool) -> Tensor:
    rows = a.x.reshape(-1, a.x.shape[-1]).to(torch.float32)
    hidden = rows.shape[-1]
    ids = a.expert_ids.reshape(rows.shape[0], -1)
    weights = a.expert_weights.reshape(ids.shape).to(torch.float32)
    outputs = torch.zeros(*ids.shape, hidden)
    for e in ids.unique().tolist():
        token, choice = torch.where(ids == e)
        chosen = rows[token]
        if weigh_input:
            chosen = chosen * weights[token, choice][:, None]
        if len(a.gate_up) <= e < len(a.gate_up) + a.identity_experts:
            outputs[token, choice] = chosen
            continue
        halves = 2 if a.gated else 1
        biases = None if a.gate_up_bias is None else a.gate_up_bias.view(-1, halves, a.intermediate)[e]
        gate, up = (
            reference_int4_linear(
                chosen,
                a.gate_up[e, h::halves],
                a.intermediate,
                a.scheme,
                bias=None if biases is None else biases[h],
                rotated=a.rotated,
            )
            for h in (0, halves - 1)
        )
        last = None if a.down_bias is None else a.down_bias.view(-1, hidden)[e]
        if adapters is not None:
            gate = gate + adapters.added(chosen, token, e, a.intermediate, 0)
            up = up + adapters.added(chosen, token, e, a.intermediate, halves - 1)
        middle = activate(gate, up, a.activation, a.limit, a.up_limit)
        found = reference_int4_linear(middle, a.down[e], hidden, a.scheme, last, rotated=a.rotated)
        if adapters is not None:
            found = found + adapters.added(middle, token, e, hidden, None)
        outputs[token, choice] = found
    out = torch.zeros_like(rows)
    for j in range(ids.shape[1]):  # in the same order as the op
        out += outputs[:, j] if weigh_input else weights[:, j : j + 1] * outputs[:, j]
    return out.to(a.x.dtype).view(a.x.shape)
