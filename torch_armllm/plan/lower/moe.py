"""Experts and their routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.expression import Expression
from torch_armllm.plan.lower.call import write_call, writers
from torch_armllm.plan.lowering import Lowering, Unlowerable
from torch_armllm.plan.program import Field, Operand

armllm = torch.ops.armllm

_FACTORS = ("inner_a", "inner_b", "inner_ranks", "outer_a", "outer_b", "outer_ranks", "adapters")
"""Arguments of the adapters of experts."""


def _moe(low: Lowering, call: OpCall) -> Operand:
    of_ranks = zip(call.inner_columns, call.outer_columns, strict=True)
    counts: Sequence[int] = call.rank_experts
    return _experts(
        low,
        call,
        experts=sum(counts) or low.held(call.gate_up).shape[0],
        ranks=[{"inner": inner, "outer": outer} for inner, outer in of_ranks],
        rank_experts=[{"experts": count} for count in counts],
        lora=[],
    )


def _moe_lora(low: Lowering, call: OpCall) -> Operand:
    experts = low.held(call.gate_up).shape[0]
    none: dict[str, Field] = {"weigh_input": False, "communicator": 0, "ranks": [], "rank_experts": []}
    return _experts(low, call, experts=experts, **none, lora=[_adapters(low, call)])


def _experts(low: Lowering, call: OpCall, **fields: Field) -> Operand:
    rows, ids, weights = (low.rows(each) for each in (call.x, call.expert_ids, call.expert_weights))
    if ids.dtype != torch.int32 or weights.dtype != torch.float32 or ids.stride != ids.width:
        raise Unlowerable(
            "has a router that is not recognized, whose experts' ids and weights moe_route does not compute"
        )
    if weights.stride != weights.width:  # columns of wider rows
        weights = low.compute(Expression(weights.inner, weights.dtype, operand=weights))
    for name in ("gate_up", "down"):
        panels = low.held(getattr(call, name))
        fields |= {f"{name}_expert_stride": panels.stride(0), f"{name}_panel_stride": panels.stride(1)}
    sizes = {"top_k": ids.width, "hidden": rows.width}
    return write_call(low, call, "moe", x=rows, ids=ids, weights=weights, **sizes, **fields)


def _adapters(low: Lowering, call: OpCall) -> dict[str, Field]:
    factors = {name: low.held(getattr(call, name)) for name in _FACTORS}
    return {
        **{name: low.program.constant(tensor) for name, tensor in factors.items()},
        "slots": len(factors["inner_a"]),
        "inner_rank": factors["inner_a"].shape[2],
        "outer_rank": factors["outer_a"].shape[2],
        "listed": len(factors["adapters"]),
        "integers": factors["inner_a"].dtype == torch.int8,
    }


def _route(low: Lowering, call: OpCall) -> Any:
    rows = low.rows(call.logits)
    weights, ids = (low.new(call.node, val) for val in call.node.meta["val"])
    write_call(
        low,
        call,
        "route",
        logits=rows,
        weights=weights,
        ids=ids,
        correction_bias=low.weight(call.correction_bias, torch.float32),
        choices=low.weight(call.choices, torch.int32),
        vocabulary=0 if call.choices is None else int(call.choices.meta["val"].shape[0]),
        experts=rows.width,
    )
    return weights, ids


WRITERS = writers(
    {
        armllm.int4_moe.default: _moe,
        armllm.int4_moe_lora.default: _moe_lora,
        armllm.moe_route.default: _route,
    }
)
