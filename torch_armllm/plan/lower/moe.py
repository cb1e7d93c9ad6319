"""Experts and their routers."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.ops.linear import SCHEMES
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import ACTIVATIONS, SCORINGS, Opcode, Operand

armllm = torch.ops.armllm


def _moe(
    low: Lowering, node: Node, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, intermediate: int,
        scheme: str,
    act: str, limit: float = 7.0, gate_up_bias: Any = None, down_bias: Any = None,
    gated: bool = True, weigh_input: bool = False,
) -> Operand:  # fmt: skip
    rows, chosen, shares = low.rows(x), low.rows(ids), low.rows(weights)
    if chosen.dtype != torch.int32 or shares.dtype != torch.float32 or chosen.stride != chosen.width:
        raise Unlowerable("the router's choice is not that of moe_route")
    first, second = low.weight(gate_up), low.weight(down)
    tensors = [low.program.constants[w.index] for w in (first, second)]
    out = low.new(node)
    low.emit(
        Opcode.MOE,
        *(rows, out, chosen, shares, first, second, low.weight(gate_up_bias), low.weight(down_bias)),
        *(t.stride(0) for t in tensors),
        *(t.stride(1) for t in tensors),
        *(
            SCHEMES[scheme],
            tensors[0].shape[0],
            chosen.width,
            rows.width,
            intermediate,
            ACTIVATIONS[act],
            float(limit),
            int(gated),
            int(weigh_input),
        ),
    )
    return out


def _route(
    low: Lowering, node: Node, logits: Any, top_k: int, scoring: str, renormalize: bool, scale: float = 1.0,
    correction: Any = None, groups: int = 1, top_k_groups: int = 1,
) -> Any:  # fmt: skip
    rows = low.rows(logits)
    weights, ids = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        Opcode.ROUTE,
        *(rows, weights, ids, low.weight(correction, torch.float32)),
        *(rows.width, top_k, groups, top_k_groups, SCORINGS[scoring], int(renormalize), float(scale)),
    )
    return weights, ids


WRITERS: dict[Any, Writer] = {
    armllm.int4_moe.default: _moe,
    armllm.moe_route.default: _route,
}
