"""Routers of fused experts: scores, choice and weights become ``moe_route``."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import is_op, value
from torch_armllm.passes.lib.router import insert_route, recognize_router
from torch_armllm.passes.lib.shared_router import recognize_shared_router
from torch_armllm.passes.lib.table_router import recognize_table_router

_EXPERTS = (
    torch.ops.armllm.int4_moe.default,
    torch.ops.armllm.int4_moe_lora.default,
    torch.ops.armllm.experts.default,
)


def _all(results: list[Tensor]) -> tuple[Tensor, Tensor]:
    return results[0], results[1]


def _without_zeros(results: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Leaves out weights of zero if every token has as many: a model may pass all experts (Llama 4)."""
    ids, weights = results
    counts = (weights != 0).sum(-1).unique()
    if counts.numel() != 1 or not 0 < int(counts) < weights.shape[-1] or ids.shape != weights.shape:
        return ids, weights
    kept = weights != 0
    return ids[kept].view(-1, int(counts)), weights[kept].view(-1, int(counts))


def _ignores_zero_weights(node: Node) -> bool:
    """True if an expert of weight 0 contributes nothing: it has no biases, which a weighted input keeps."""
    experts = OpCall(node)
    return all(getattr(experts, name) is None for name in experts.names if name.endswith("_bias"))


def _count(node: Node) -> int:
    """Returns the number of experts that a router chooses from: those with weights, and identities."""
    return int(value(OpCall(node).down).shape[0] + OpCall(node).identity_experts)


def _is_routed(node: Node) -> bool:
    """True if a layer's experts are chosen by other nodes."""
    return isinstance(OpCall(node).expert_ids, Node) and isinstance(OpCall(node).expert_weights, Node)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Fuses the routing of every ``int4_moe`` (and float ``experts``) that it recognizes."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, *_EXPERTS) or not _is_routed(node):
            continue
        ids, weights, experts = OpCall(node).expert_ids, OpCall(node).expert_weights, _count(node)
        choice = _without_zeros if _ignores_zero_weights(node) else _all
        match = recognize_router(module, (ids, weights), experts, choice)
        if match is None:
            shared = recognize_shared_router(module, ids, weights, experts)
            other = shared or recognize_table_router(module, ids, weights, experts)
            if other is not None:
                other.replace(module, node)
                num_rewritten += 1
            continue
        region, route, top_k = match
        new_ids, new_weights = insert_route(module, node, region.entry, route, top_k)
        OpCall(node).replace(expert_ids=new_ids, expert_weights=new_weights)
        region.erase(graph)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
