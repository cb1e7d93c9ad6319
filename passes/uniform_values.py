"""Removal of what values that are the same for all tokens do not change, such as masks that hide nothing.

Models of several modalities make masks and numbers of tokens for inputs that a text does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, constant, is_op, is_written, replace_nodes, value

_VIEWS = (
    *(aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten.expand, aten.expand_as, aten.transpose),
    *(aten.permute, aten.slice, aten.select, aten.contiguous, aten.clone, aten.alias, aten.flatten),
    *(aten.repeat, aten.t),
)
_UNTAGGED = (aten.where, aten.__or__, aten.__and__)
"""Elementwise operators without PyTorch's pointwise tag."""
_CONVERSIONS = (aten.to, aten._to_copy, aten.type_as)


class _Uniform:
    """The values of nodes that are the same everywhere, as tensors without dimensions."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.values: dict[Node, Tensor] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                found = self._value(node)
                if found is not None:
                    self.values[node] = found

    def _value(self, node: Node) -> Tensor | None:
        dtype = value(node).dtype
        if is_written(node):
            return None
        if is_op(node, aten.ones, aten.ones_like, aten.new_ones):
            return torch.ones((), dtype=dtype)
        if is_op(node, aten.zeros, aten.zeros_like, aten.new_zeros):
            return torch.zeros((), dtype=dtype)
        if is_op(node, aten.full, aten.full_like, aten.new_full):
            fill = OpCall(node).fill_value
            return torch.full((), fill, dtype=dtype) if isinstance(fill, bool | int | float) else None
        if is_op(node, *_CONVERSIONS):
            source = self.values.get(OpCall(node).self)
            return None if source is None else source.to(dtype)
        if is_op(node, *_VIEWS):
            return self.values.get(OpCall(node).first)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, *_UNTAGGED):
            return self._computed(node)
        return None

    def _computed(self, node: Node) -> Tensor | None:
        """Returns the result of an elementwise operator whose operands are all uniform."""
        schema = getattr(node.target, "_schema", None)
        known = {each: self.of(each) for each in node.all_input_nodes}
        if not known or schema is None or schema.is_mutable or None in known.values():
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result.to(value(node).dtype)

    def of(self, node: Any) -> Tensor | None:
        """Returns the value of an operand, of a number or of a constant of one value; None if it has many."""
        if isinstance(node, bool | int | float):
            return torch.tensor(node)
        tensor = constant(self.module, node)
        if tensor is not None:
            return tensor.reshape(()) if tensor.numel() == 1 else None
        return self.values.get(node)


def _is_same(source: Any, node: Node) -> bool:
    """True if a tensor has the shape and type of a result that is equal to it."""
    if not isinstance(source, Node) or value(source).dtype != value(node).dtype:
        return False
    return bool(value(source).shape == value(node).shape)


def _unchanged(known: _Uniform, node: Node) -> Any:
    """Returns the operand that a node's result is equal to, or None."""
    if is_op(node, aten.where.self):
        chooses = OpCall(node)
        condition = known.of(chooses.condition)
        return None if condition is None else chooses.self if bool(condition) else chooses.other
    if is_op(node, aten.masked_fill.Scalar):
        fill = OpCall(node)
        mask = known.of(fill.mask)
        return fill.self if mask is not None and not bool(mask) else None
    neutral = next((one for operator, one in _NEUTRAL.items() if is_op(node, operator)), None)
    if neutral is None or (value(node).dtype == torch.bool) != isinstance(neutral, bool):
        return None
    if is_op(node, aten.add.Tensor) and OpCall(node).alpha != 1:
        return None
    a, b = OpCall(node).self, OpCall(node).other
    for operand, other in ((a, b), (b, a)):
        found = known.values.get(other)
        if found is not None and found.item() == neutral:
            return operand
    return None


_NEUTRAL = {
    aten.mul.Tensor: 1.0,
    aten.add.Tensor: 0.0,
    aten.logical_and: True,
    aten.__and__: True,
    aten.bitwise_and: True,
    aten.logical_or: False,
    aten.__or__: False,
    aten.bitwise_or: False,
}
"""Operators, and the operand with which they return the other one."""


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Removes operators that a uniform operand makes identities."""
    known = _Uniform(module)
    if not known.values:
        return 0

    def replacement(node: Node) -> Node | None:
        if node in known.values or node.op != "call_function":
            return None
        same = _unchanged(known, node)
        return same if _is_same(same, node) else None

    return replace_nodes(module.graph, replacement)
