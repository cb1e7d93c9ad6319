"""Recurrent layers on packed tokens: each marker op becomes the op of its kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.recurrent_ops import markers_of
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.entry_layout import PLACE, entries_name
from torch_armllm.passes.lib.graph import as_float32, aten, call, constant, match, new_constant, value
from torch_armllm.passes.lib.paged_inputs import (
    BLOCK_SIZE,
    add_paged_inputs,
    add_state_inputs,
    paged_inputs,
)
from torch_armllm.passes.lib.state_layout import state_layout

armllm = torch.ops.armllm


def _sequence(graph: fx.Graph, node: Any) -> Node:
    """``(1, T, …)`` → ``(T, …)``."""
    return call(graph, aten.select.int, node, 0, 0)


def _swap(node: Any) -> OpCall | None:
    """Returns the call of a node that swaps channels and tokens; None for any other node."""
    found = match(node, aten.transpose.int)
    return found if found is not None and {found.dim0, found.dim1} == {1, 2} else None


def _convolve(module: fx.GraphModule, node: Node, state: Node, steps: tuple[Node, ...], saves: Node) -> Node:
    x, weight, bias, silu = node.args
    taps, offsets = constant(module, weight), constant(module, bias)
    assert taps is not None
    weight = new_constant(module, node, "taps", taps.float().T.contiguous())
    if offsets is not None:
        bias = new_constant(module, node, "conv_bias", offsets.float())
    graph = module.graph
    with graph.inserting_before(node):
        swap = _swap(x)
        by_rows = call(graph, aten.transpose.int, x, 1, 2) if swap is None else swap.self
        rows = _sequence(graph, by_rows)
        conv = armllm.causal_conv.default
        out = call(graph, conv, rows, weight, bias, state, *steps, silu, save_slots=saves)
        by_token = call(graph, aten.unsqueeze.default, out, 0)
        by_channel = call(graph, aten.transpose.int, by_token, 1, 2)
    for user in list(node.users):
        if _swap(user) is not None:
            user.replace_all_uses_with(by_token)
            graph.erase_node(user)
    return by_channel


def _delta_rule(
    module: fx.GraphModule, node: Node, state: Node, steps: tuple[Node, ...], saves: Node
) -> Node:
    marker = OpCall(node)
    rows = marker.q, marker.k, marker.v, marker.gate, marker.beta
    options = marker.scale, marker.normalize, marker.delta
    graph, rule = module.graph, armllm.gated_delta_rule.default
    with graph.inserting_before(node):
        own = [_sequence(graph, x) for x in rows]
        out = call(graph, rule, *own, state, *steps, *options, save_slots=saves)
        return call(graph, aten.unsqueeze.default, out, 0)


def _scan(module: fx.GraphModule, node: Node, state: Node, steps: tuple[Node, ...], saves: Node) -> Node:
    x, dt, a, b, c, *options = node.args
    rates = constant(module, a)
    assert rates is not None
    a = new_constant(module, node, "rates", rates.contiguous())
    graph = module.graph
    with graph.inserting_before(node):
        x, dt, b, c = (None if rows is None else _sequence(graph, rows) for rows in (x, dt, b, c))
        out = call(
            graph, armllm.selective_scan.default, x, dt, a, b, c, state, *steps, *options, save_slots=saves
        )
        return call(graph, aten.unsqueeze.default, out, 0)


def _compress(module: fx.GraphModule, node: Node, state: Node, steps: tuple[Node, ...], saves: Node) -> Node:
    kv, gate, bias, weight, cos, sin, eps = node.args
    graph, inputs = module.graph, paged_inputs(module)
    bias, weight = (as_float32(module, node, name, x) for name, x in (("bias", bias), ("weight", weight)))
    group, number = node.meta[PLACE]
    with graph.inserting_before(node):
        kv, gate, cos, sin = (_sequence(graph, x) for x in (kv, gate, cos, sin))
        entries = call(graph, aten.select.int, inputs[entries_name(group)], 0, number)
        rows = (kv, gate, bias, weight, cos, sin, state, entries, inputs["block_table"])
        compress = armllm.compress_windows.default
        return call(graph, compress, *rows, *steps, BLOCK_SIZE, eps, save_slots=saves)


_REWRITES = {
    armllm.window_entries.default: _compress,
    armllm.convolve_tokens.default: _convolve,
    armllm.delta_rule.default: _delta_rule,
    armllm.scan_channels.default: _scan,
}


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all recurrent markers; does nothing if the context is not paged."""
    graph = module.graph
    nodes = markers_of(module)
    if not context.paged or not nodes:
        return 0
    layout = state_layout(module)
    inputs = paged_inputs(module)
    if not inputs:
        ids = next(n for n in graph.nodes if n.op == "placeholder")
        inputs = add_paged_inputs(module, nodes[0], value(ids).shape[1], {})
    states = add_state_inputs(
        module,
        nodes[0],
        value(inputs["slots"]).shape[0],
        [(kind.dtype, (layout.count(i), 4, *kind.sizes)) for i, kind in enumerate(layout.groups)],
    )
    steps = (states.slots, inputs["query_start"], inputs["seq_lens"])
    for node, (group, number) in zip(nodes, layout.positions, strict=True):
        with graph.inserting_before(node):
            state = call(graph, aten.select.int, states.groups[group], 0, number)
        rewrite = _REWRITES[node.target]  # type: ignore[index]
        node.replace_all_uses_with(rewrite(module, node, state, steps, states.saves))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
