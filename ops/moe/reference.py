"""Slow, plain PyTorch version of the experts: one token and one expert at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.reference import activate, reference_int4_linear


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
) -> Tensor:
    """Reference of :func:`int4_moe`, equal to it up to the activation function's last bits.

    Such a bit may move an intermediate value by one INT8 step, so outputs agree to about one part in a
    hundred of the largest; with ``relu`` and an exact scheme they agree to float32 rounding.
    """
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    hidden = rows.shape[-1]
    ids = expert_ids.reshape(rows.shape[0], -1)
    weights = expert_weights.reshape(ids.shape).to(torch.float32)
    out = torch.zeros_like(rows)
    for t in range(rows.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            row, share = rows[t : t + 1], weights[t, j]
            if weigh_input:
                row, share = row * share, torch.ones(())
            halves = 2 if gated else 1
            biases = None if gate_up_bias is None else gate_up_bias.view(-1, halves, intermediate)[e]
            gate, up = (
                reference_int4_linear(
                    row, gate_up[e, h::halves], intermediate, scheme, None if biases is None else biases[h]
                )
                for h in (0, halves - 1)
            )
            last = None if down_bias is None else down_bias.view(-1, hidden)[e]
            y = reference_int4_linear(activate(gate, up, activation, limit), down[e], hidden, scheme, last)
            out[t] += share * y[0]
    return out.to(x.dtype).view(x.shape)
