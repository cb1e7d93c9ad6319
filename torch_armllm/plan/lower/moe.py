"""Experts and their routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from torch_armllm.plan.expression import Expression
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Field, Operand

armllm = torch.ops.armllm


def _moe(
    low: Lowering, node: Node, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, intermediate: int,
        scheme: str,
    act: str, limit: float = 7.0, gate_up_bias: Any = None, down_bias: Any = None,
    gated: bool = True, weigh_input: bool = False, identity_experts: int = 0, up_limit: float = 7.0,
    rotated: bool = False, communicator: int = 0, inner_columns: Any = (), outer_columns: Any = (),
    rank_experts: Any = (), lora: Sequence[Tensor] = (),
) -> Operand:  # fmt: skip
    rows, expert_ids, expert_weights = low.rows(x), low.rows(ids), low.rows(weights)
    if (
        expert_ids.dtype != torch.int32
        or expert_weights.dtype != torch.float32
        or expert_ids.stride != expert_ids.width
    ):
        raise Unlowerable(
            "has a router that is not recognized, whose experts' ids and weights moe_route does not compute"
        )
    if expert_weights.stride != expert_weights.width:  # columns of wider rows
        leaf = Expression(expert_weights.inner, expert_weights.dtype, operand=expert_weights)
        expert_weights = low.compute(leaf)
    first, second = low.weight(gate_up), low.weight(down)
    gate_up_panels, down_panels = (low.program.constants[w.index] for w in (first, second))
    out = low.new(node)
    low.emit(
        "moe",
        x=rows,
        out=out,
        ids=expert_ids,
        weights=expert_weights,
        gate_up=first,
        down=second,
        gate_up_bias=low.weight(gate_up_bias),
        down_bias=low.weight(down_bias),
        gate_up_expert_stride=gate_up_panels.stride(0),
        down_expert_stride=down_panels.stride(0),
        gate_up_panel_stride=gate_up_panels.stride(1),
        down_panel_stride=down_panels.stride(1),
        scheme=scheme,
        experts=sum(rank_experts) or gate_up_panels.shape[0],
        identity_experts=identity_experts,
        top_k=expert_ids.width,
        hidden=rows.width,
        intermediate=intermediate,
        activation=act,
        limit=limit,
        up_limit=up_limit,
        gated=gated,
        weigh_input=weigh_input,
        rotated=rotated,
        communicator=communicator,
        ranks=[{"inner": i, "outer": o} for i, o in zip(inner_columns, outer_columns, strict=True)],
        rank_experts=[{"experts": count} for count in rank_experts],
        lora=[_adapters(low, *lora)] if lora else [],
    )
    return out


def _adapters(
    low: Lowering, inner_a: Tensor, inner_b: Tensor, inner_ranks: Tensor, outer_a: Tensor, outer_b: Tensor,
    outer_ranks: Tensor, adapters: Tensor,
) -> dict[str, Field]:  # fmt: skip
    operands = {
        "inner_a": inner_a,
        "inner_b": inner_b,
        "inner_ranks": inner_ranks,
        "outer_a": outer_a,
        "outer_b": outer_b,
        "outer_ranks": outer_ranks,
        "adapters": adapters,
    }
    return {
        **{name: low.program.constant(tensor) for name, tensor in operands.items()},
        "slots": len(inner_a),
        "inner_rank": inner_a.shape[2],
        "outer_rank": outer_a.shape[2],
        "listed": len(adapters),
        "integers": inner_a.dtype == torch.int8,
    }


def _moe_lora(
    low: Lowering, node: Node, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, intermediate: int,
    scheme: str, act: str, inner_a: Any, inner_b: Any, inner_ranks: Any, outer_a: Any, outer_b: Any,
    outer_ranks: Any, adapters: Any, limit: float = 7.0, gate_up_bias: Any = None, down_bias: Any = None,
    gated: bool = True, identity_experts: int = 0, up_limit: float = 7.0, rotated: bool = False,
) -> Operand:  # fmt: skip
    factors = inner_a, inner_b, inner_ranks, outer_a, outer_b, outer_ranks, adapters
    return _moe(
        *(low, node, x, ids, weights, gate_up, down, intermediate, scheme, act, limit, gate_up_bias),
        *(down_bias, gated, False, identity_experts, up_limit, rotated),
        lora=[low.held(each) for each in factors],
    )


def _route(
    low: Lowering, node: Node, logits: Any, top_k: int, scoring: str, renormalize: bool, scale: float = 1.0,
    correction: Any = None, groups: int = 1, top_k_groups: int = 1, epsilon: float = 1e-20,
    token_ids: Any = None, choices: Any = None,
) -> Any:  # fmt: skip
    rows = low.rows(logits)
    weights, ids = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        "route",
        logits=rows,
        weights=weights,
        ids=ids,
        correction_bias=low.weight(correction, torch.float32),
        token_ids=NOTHING if token_ids is None else low.rows(token_ids),
        choices=low.weight(choices, torch.int32),
        vocabulary=0 if choices is None else int(choices.meta["val"].shape[0]),
        experts=rows.width,
        top_k=top_k,
        groups=groups,
        top_k_groups=top_k_groups,
        scoring=scoring,
        renormalize=renormalize,
        scale=scale,
        epsilon=epsilon,
    )
    return weights, ids


WRITERS: dict[Any, Writer] = {
    armllm.int4_moe.default: _moe,
    armllm.int4_moe_lora.default: _moe_lora,
    armllm.moe_route.default: _route,
}
