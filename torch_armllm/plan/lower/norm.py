"""RMSNorm and LayerNorm, with the residual add in front of them, and Sinkhorn normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _norm(
    low: Lowering,
    node: Node,
    opcode: str,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float,
    offset: float,
) -> Any:
    rows = low.rows(x)
    width = rows.inner[-1]
    added = low.rows(residual) if residual is not None else NOTHING
    val = node.meta["val"] if residual is None else node.meta["val"][0]
    out = low.new(node, val)
    total = low.new(node, val) if residual is not None else NOTHING
    low.emit(
        opcode,
        x=rows,
        out=out,
        residual=added,
        sum=total,
        weight=low.weight(weight),
        bias=low.weight(bias),
        rows_per_token=rows.width // width,
        width=width,
        eps=eps,
        weight_offset=offset,
    )
    return out if residual is None else (out, total)


def _rms_norm(low: Lowering, node: Node, x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
    return _norm(low, node, "rms_norm", x, None, weight, None, eps, offset)


def _add_rms_norm(
    low: Lowering, node: Node, x: Any, r: Any, weight: Any, eps: float, offset: float = 0.0
) -> Any:
    return _norm(low, node, "rms_norm", x, r, weight, None, eps, offset)


def _layer_norm(low: Lowering, node: Node, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _norm(low, node, "layer_norm", x, None, weight, bias, eps, 0.0)


def _add_layer_norm(low: Lowering, node: Node, x: Any, r: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _norm(low, node, "layer_norm", x, r, weight, bias, eps, 0.0)


def _sinkhorn(low: Lowering, node: Node, x: Any, rounds: int, eps: float) -> Operand:
    rows, out = low.rows(x), low.new(node)
    if len(rows.inner) != 2:
        raise Unlowerable("normalizes several matrices of each token")
    low.emit("sinkhorn", x=rows, out=out, size=rows.inner[-1], rounds=rounds, eps=eps)
    return out


WRITERS: dict[Any, Writer] = {
    armllm.rms_norm.default: _rms_norm,
    armllm.add_rms_norm.default: _add_rms_norm,
    armllm.layer_norm.default: _layer_norm,
    armllm.add_layer_norm.default: _add_layer_norm,
    armllm.sinkhorn.default: _sinkhorn,
}
