"""RMSNorm and LayerNorm, with the residual add in front of them, and Sinkhorn normalization."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.lower.call import write_call, writers
from torch_armllm.plan.lowering import Lowering, Unlowerable
from torch_armllm.plan.program import NOTHING, Field, Operand

armllm = torch.ops.armllm


def _rms_norm(low: Lowering, call: OpCall) -> Any:
    return _norm(low, call, "rms_norm", bias=NOTHING)


def _layer_norm(low: Lowering, call: OpCall) -> Any:
    return _norm(low, call, "layer_norm", weight_offset=0.0)


def _norm(low: Lowering, call: OpCall, opcode: str, **fields: Field) -> Any:
    rows = low.rows(call.x)
    width = rows.inner[-1]
    fields |= {"x": rows, "rows_per_token": rows.width // width, "width": width}
    if "residual" not in call.names:
        return write_call(low, call, opcode, residual=NOTHING, sum=NOTHING, **fields)
    added = low.rows(call.residual)
    out, total = (low.new(call.node, val) for val in call.node.meta["val"])
    write_call(low, call, opcode, residual=added, out=out, sum=total, **fields)
    return out, total


def _sinkhorn(low: Lowering, call: OpCall) -> Operand:
    rows = low.rows(call.x)
    if len(rows.inner) != 2:
        raise Unlowerable("normalizes several matrices of each token")
    return write_call(low, call, "sinkhorn", x=rows, size=rows.inner[-1])


WRITERS = writers(
    {
        armllm.rms_norm.default: _rms_norm,
        armllm.add_rms_norm.default: _rms_norm,
        armllm.layer_norm.default: _layer_norm,
        armllm.add_layer_norm.default: _layer_norm,
        armllm.sinkhorn.default: _sinkhorn,
    }
)
