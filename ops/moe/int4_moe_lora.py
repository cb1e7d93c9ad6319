"""Experts with low-rank additions to their products (LoRA); each token has an adapter of its own, or none."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.ops.declare import fake
from torch_armllm.ops.lora import reference_lora_sums


class ExpertAdapters(NamedTuple):
    """Adapters of all experts of a layer, in the layouts of :func:`torch_armllm.ops.lora.lora_linear`.

    All factors are of float32, bfloat16 or float16, or all are integers of these rows, as
    :func:`torch_armllm.ops.lora.lora_integers` makes them.

    Attributes:
        inner_a: ``(slots, E, R, H)``, contiguous, for gate and up.
        inner_b: ``(slots, E, 2, ⌈I / 64⌉, R, 64)``, gate before up; without a gate, 1 in the place of 2.
        inner_ranks: int32 ``(slots,)``: ranks in use, at most R; 0: gate and up have no adapter.
        outer_a: ``(slots, E, Q, I)``, for down.
        outer_b: ``(slots, E, 1, ⌈H / 64⌉, Q, 64)``.
        outer_ranks: int32 ``(slots,)``, at most Q.
        adapters: int32 ``(L,)``: slot of each token, −1 for none.  Tokens from L on have none.
    """

    inner_a: Tensor
    inner_b: Tensor
    inner_ranks: Tensor
    outer_a: Tensor
    outer_b: Tensor
    outer_ranks: Tensor
    adapters: Tensor

    def added(self, x: Tensor, tokens: Tensor, expert: int, columns: int, part: int | None) -> Tensor:
        """Returns what is added to rows of an expert's product, in float32 PyTorch.

        Args:
            x: float32 rows of the product's input.
            tokens: the token of each row.
            expert: number of the expert.
            columns: of the product.
            part: 0 for the gate, 1 for up, or 0 for up alone; None for down.
        """
        inner = part is not None
        a, b, ranks = (self.inner_a, self.inner_b, self.inner_ranks) if inner else self[3:6]
        out = torch.zeros(len(x), columns)
        for row, token in enumerate(tokens.tolist()):
            slot = int(self.adapters[token]) if token < len(self.adapters) else -1
            if slot >= 0:
                factors = a[slot, expert], b[slot, expert, part or 0]
                out[row] = reference_lora_sums(x[row], *factors, int(ranks[slot]), columns)
        return out


def int4_moe_lora(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    intermediate: int,
    adapters: ExpertAdapters,
    scheme: str = "g32i",
    activation: str = "silu",
    limit: float = 7.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    identity_experts: int = 0,
    up_limit: float = 7.0,
    rotated: bool = False,
) -> Tensor:
    """Returns :func:`int4_moe` of experts whose products have low-rank additions.

    ``(x · A[s][e]ᵀ) · B[s][e]`` is added to gate and up before the activation, and to down before the
    weighted sum, where s is the slot of the token and e the expert.  x is the float input of the product,
    before it is rotated or rounded; sums are float32.  A token without an adapter has the bits of
    :func:`int4_moe`.

    Args:
        x: see `int4_moe`, as are all others but ``adapters``.
        expert_ids: ``(..., top_k)``.
        expert_weights: ``(..., top_k)``.
        gate_up: packed weights of gate and up.
        down: packed weights of down.
        intermediate: I.
        adapters: the factors, and the slot of each token.
        scheme: of both weights.
        activation: name of the activation.
        limit: of activations that clamp.
        gate_up_bias: ``(E, 2, I)`` or ``(E, I)``.
        down_bias: ``(E, H)``.
        gated: whether there is a gate.
        identity_experts: ids of experts that return their input.
        up_limit: of ``silu_softcapped``.
        rotated: whether the weights are those of rotated inputs.

    Returns:
        ``(..., H)`` in the dtype of ``x``.  A token's result has the same bits alone and in any batch
        wherever that of `int4_moe` has.

    Raises:
        RuntimeError: see `int4_moe`; or a factor has a wrong shape or dtype, or a token's slot or a rank is
            out of range.
    """
    result: Tensor = torch.ops.armllm.int4_moe_lora(
        x,
        expert_ids,
        expert_weights,
        gate_up,
        down,
        intermediate,
        scheme,
        activation,
        *adapters,
        limit,
        gate_up_bias,
        down_bias,
        gated,
        identity_experts,
        up_limit,
        rotated,
    )
    return result


fake("int4_moe_lora", lambda a: a.x.new_empty(a.x.shape))
