"""Recurrent layers: causal convolution, gated delta rule and selective scan."""

from __future__ import annotations

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.lower.call import cache_layer, write_call, writers
from torch_armllm.plan.lowering import Lowering
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def step_fields(low: Lowering, call: OpCall) -> dict[str, int]:
    """Returns the fields that name the states of a step."""
    layer = cache_layer(low, call.state)
    assert call.save_slots is not None
    return {"state": layer.input, "layer": layer.layer}


def _causal_conv(low: Lowering, call: OpCall) -> Operand:
    taps, channels = call.weight.meta["val"].shape[0], low.rows(call.x).width
    sizes = {"taps": int(taps), "channels": channels}
    return write_call(low, call, "causal_conv", **step_fields(low, call), **sizes)


def _gated_delta_rule(low: Lowering, call: OpCall) -> Operand:
    keys, values, decays = low.rows(call.k), low.rows(call.v), low.rows(call.gate)
    return write_call(
        low,
        call,
        "gated_delta_rule",
        k=keys,
        v=values,
        gate=decays,
        **step_fields(low, call),
        key_heads=keys.inner[0],
        value_heads=values.inner[0],
        key_size=keys.inner[1],
        value_size=values.inner[1],
        gate_per_channel=len(decays.inner) == 2,
    )


def _selective_scan(low: Lowering, call: OpCall) -> Operand:
    states, channels = call.a.meta["val"].shape[0], low.rows(call.x).width
    sizes = {"states": int(states), "channels": channels}
    return write_call(low, call, "selective_scan", torch.float32, **step_fields(low, call), **sizes)


WRITERS = writers(
    {
        armllm.causal_conv.default: _causal_conv,
        armllm.gated_delta_rule.default: _gated_delta_rule,
        armllm.selective_scan.default: _selective_scan,
    }
)
