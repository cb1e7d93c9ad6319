"""Recurrent layers: causal convolution, gated delta rule and selective scan."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.plan.lowering import CacheLayer, Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def step_fields(
    low: Lowering, state: Node, slots: Node, starts: Node, lengths: Node, saves: Node | None
) -> dict[str, int]:
    """Returns the fields that name the states and the sequences of a step."""
    layer = low.locations.get(state)
    if not isinstance(layer, CacheLayer):
        raise Unlowerable("reads a state that is no layer of the cache")
    assert saves is not None
    inputs = low.inputs.index
    return {
        "state": layer.input,
        "layer": layer.layer,
        "state_slots": inputs(slots.name),
        "save_slots": inputs(saves.name),
        "query_start": inputs(starts.name),
        "seq_lens": inputs(lengths.name),
    }


def _causal_conv(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any,
    state: Node,
    slots: Node,
    starts: Node,
    lengths: Node,
    silu: bool = False,
    save_slots: Node | None = None,
) -> Operand:
    rows = low.rows(x)
    out = low.new(node)
    low.emit(
        "causal_conv",
        x=rows,
        out=out,
        weight=low.weight(weight),
        bias=low.weight(bias),
        **step_fields(low, state, slots, starts, lengths, save_slots),
        channels=out.width,
        taps=int(weight.meta["val"].shape[0]),
        silu=silu,
    )
    return out


def _gated_delta_rule(
    low: Lowering,
    node: Node,
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    state: Node,
    slots: Node,
    starts: Node,
    lengths: Node,
    scale: float,
    normalize: bool = False,
    delta: bool = True,
    save_slots: Node | None = None,
) -> Operand:
    queries, keys, values, decays, shares = (low.rows(x) for x in (q, k, v, gate, beta))
    out = low.new(node)
    low.emit(
        "gated_delta_rule",
        q=queries,
        k=keys,
        v=values,
        gate=decays,
        beta=shares,
        out=out,
        **step_fields(low, state, slots, starts, lengths, save_slots),
        key_heads=keys.inner[0],
        value_heads=values.inner[0],
        key_size=keys.inner[1],
        value_size=values.inner[1],
        gate_per_channel=len(decays.inner) == 2,
        normalize=normalize,
        delta=delta,
        scale=scale,
    )
    return out


def _selective_scan(
    low: Lowering,
    node: Node,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    state: Node,
    slots: Node,
    starts: Node,
    lengths: Node,
    normalize: bool = False,
    save_slots: Node | None = None,
) -> Operand:
    rows, steps = low.rows(x), low.rows(dt)
    added, read = (NOTHING if factors is None else low.rows(factors) for factors in (b, c))
    out = low.new(node)
    low.emit(
        "selective_scan",
        x=rows,
        dt=steps,
        a=low.weight(a, torch.float32),
        b=added,
        c=read,
        out=out,
        **step_fields(low, state, slots, starts, lengths, save_slots),
        channels=out.width,
        states=int(a.meta["val"].shape[0]),
        normalize=normalize,
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.causal_conv.default: _causal_conv,
    armllm.gated_delta_rule.default: _gated_delta_rule,
    armllm.selective_scan.default: _selective_scan,
}
