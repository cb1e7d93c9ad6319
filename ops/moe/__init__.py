"""Mixture of Experts (MoE): all experts of a layer in one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_armllm.ops.collective import rank_of
from torch_armllm.ops.declare import op
from torch_armllm.ops.moe.int4_moe_lora import ExpertAdapters, int4_moe_lora
from torch_armllm.ops.moe.moe_route import SCORINGS, moe_route, reference_moe_route
from torch_armllm.ops.moe.reference import reference_int4_moe, reference_int4_moe_lora

__all__ = [
    "SCORINGS",
    "ExpertAdapters",
    "int4_moe",
    "int4_moe_lora",
    "moe_route",
    "reference_int4_moe",
    "reference_int4_moe_lora",
    "reference_moe_route",
]


def _int4_moe_result(a: Any) -> Any:
    columns = (
        a.outer_columns[rank_of(a.communicator)] if a.communicator and a.outer_columns else a.x.shape[-1]
    )
    return a.x.new_empty((*a.x.shape[:-1], columns))


@op(_int4_moe_result)
def int4_moe(
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
    communicator: int = 0,
    inner_columns: Sequence[int] = (),
    outer_columns: Sequence[int] = (),
    rank_experts: Sequence[int] = (),
) -> Tensor:
    """Weighted sum over each token's experts of ``down(act(gate(x)) · up(x))``.

    Args:
        x: ``(..., H)``, float32, bfloat16 or float16; T rows in total.
        expert_ids: ``(..., top_k)``, T rows, int64 or int32, values in ``0 .. E + identity_experts - 1``.  A
            token may name an expert twice.
        expert_weights: same shape as ``expert_ids``, any of the float dtypes.
        gate_up: uint8 ``(E, 2 · ceil(I / 16), panel_bytes)``: gate and up, each packed by
            :func:`torch_armllm.ops.linear.pack_int4`, with alternating panels
            (:func:`torch_armllm.ops.linear.interleave_panels`).
        down: uint8 ``(E, ceil(H / 16), panel_bytes)``.
        intermediate: I.
        scheme: scheme of both weights, as in `int4_linear`, or ``i8``.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``swiglu_clamped``, ``silu_clamped`` or
            ``silu_softcapped``.
        limit: clamping limit of ``swiglu_clamped`` and ``silu_clamped``; bound of the gate in
            ``silu_softcapped``.
        gate_up_bias: ``(E, 2, I)``, gate before up.
        down_bias: ``(E, H)``, of the same dtype.
        gated: whether there is a gate.  If False, ``gate_up`` is ``(E, ceil(I / 16), panel_bytes)`` with only
            up, its bias is ``(E, I)``, and the input of ``down`` is ``act(up(x)) · up(x)``.  With ``relu``
            this is the squared ReLU.
        weigh_input: whether the weights multiply the experts' inputs (Llama 4) instead of their outputs.
        identity_experts: number of ids from E on whose experts return ``x`` itself (LongCat's zero experts).
        up_limit: bound of up in ``silu_softcapped``.
        rotated: both weights are W · H, group by group, and inputs are rotated before they are quantized: see
            `int4_linear`; H and I are multiples of 32.
        communicator: of tensor parallel ranks, see `torch_armllm.ops.collective.open_communicator`; 0: this
            process computes all.  Each rank's weights have the panels of its own columns, its biases are
            whole, and every rank has to call the op.
        inner_columns: of the I columns, those of each rank, one rank after another: multiples of 16 but for
            the last.
        outer_columns: likewise, of the H columns of the result.
        rank_experts: in place of columns, the number of experts of each rank, one rank after another.  A
            rank's weights are those of its own experts, its biases are those of all.

    Returns:
        A tensor of the shape and dtype of ``x``; with ``outer_columns`` it has a rank's own columns.  Tokens
        and intermediate rows are quantized to INT8; everything else is float32 and is rounded once, at the
        end.  With an exact scheme a token's result has the same bits alone and in any batch, for every kernel
        variant, thread count and number of ranks.

    Raises:
        RuntimeError: a shape, dtype, scheme or activation is wrong, or an id is out of range; the message
            names the value and the expected value.
    """
