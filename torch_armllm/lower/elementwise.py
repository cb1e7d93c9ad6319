"""What is computed element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.lowering import Lowering, Unlowerable, Writer
from torch_armllm.passes.match import aten
from torch_armllm.program import ACTIVATIONS, Opcode, Operand

armllm = torch.ops.armllm


def _gated_act(low: Lowering, node: Node, gate: Any, up: Any, act: str) -> Operand:
    out = low.new(node)
    low.emit(Opcode.GATED_ACT, low.rows(gate), low.rows(up), out, out.width, ACTIVATIONS[act])
    return out


def _add(low: Lowering, node: Node, a: Any, b: Any, alpha: float = 1) -> Operand:
    first, second = low.rows(a), low.rows(b)
    if alpha != 1 or first.width != second.width or first.dtype != second.dtype:
        raise Unlowerable(f"{node} is not a plain addition of rows")
    out = low.new(node)
    low.emit(Opcode.ADD, first, second, out, out.width)
    return out


WRITERS: dict[Any, Writer] = {
    aten.add.Tensor: _add,
    armllm.gated_act.default: _gated_act,
}
