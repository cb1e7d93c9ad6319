"""Reference of the MoE op: slow plain PyTorch, one expert at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.reference import activate, reference_int4_linear
from torch_armllm.ops.moe.int4_moe_lora import ExpertAdapters


def reference_int4_moe(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    intermediate: int,
    scheme: str = "g32i",
    activation: str = "silu",
    limit: float = 7.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    weigh_input: bool = False,
    identity_experts: int = 0,
    up_limit: float = 7.0,
    rotated: bool = False,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Reference of :func:`int4_moe`, equal to it except for the last bits of the activation function.

    With adapters it is that of :func:`int4_moe_lora`.  Such a bit can change an intermediate value by one
    INT8 step, so outputs agree to about one percent of the largest output.  With ``relu`` and an exact scheme
    they agree to float32 rounding, unless there are adapters.
    """
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    hidden = rows.shape[-1]
    ids = expert_ids.reshape(rows.shape[0], -1)
    weights = expert_weights.reshape(ids.shape).to(torch.float32)
    outputs = torch.zeros(*ids.shape, hidden)
    for e in ids.unique().tolist():
        token, choice = torch.where(ids == e)
        chosen = rows[token]
        if weigh_input:
            chosen = chosen * weights[token, choice][:, None]
        if len(gate_up) <= e < len(gate_up) + identity_experts:
            outputs[token, choice] = chosen
            continue
        halves = 2 if gated else 1
        biases = None if gate_up_bias is None else gate_up_bias.view(-1, halves, intermediate)[e]
        gate, up = (
            reference_int4_linear(
                *(chosen, gate_up[e, h::halves], intermediate, scheme),
                bias=None if biases is None else biases[h],
                rotated=rotated,
            )
            for h in (0, halves - 1)
        )
        last = None if down_bias is None else down_bias.view(-1, hidden)[e]
        if adapters is not None:
            gate = gate + adapters.added(chosen, token, e, intermediate, 0)
            up = up + adapters.added(chosen, token, e, intermediate, halves - 1)
        middle = activate(gate, up, activation, limit, up_limit)
        found = reference_int4_linear(middle, down[e], hidden, scheme, last, rotated=rotated)
        if adapters is not None:
            found = found + adapters.added(middle, token, e, hidden, None)
        outputs[token, choice] = found
    out = torch.zeros_like(rows)
    for j in range(ids.shape[1]):  # in the same order as the op
        out += outputs[:, j] if weigh_input else weights[:, j : j + 1] * outputs[:, j]
    return out.to(x.dtype).view(x.shape)
