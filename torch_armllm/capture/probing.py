"""Tools for evaluating parts of a captured graph on numbers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

_FLOATS = (torch.bfloat16, torch.float16, torch.float64)


def is_size(node: Node) -> bool:
    """True if a node is a number, such as a symbolic size."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def number(val: Any, rows: int) -> Any:
    """Evaluates a symbolic size with ``rows`` as the only dynamic dimension."""
    if not isinstance(val, torch.SymInt):
        return val
    expression = val.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, rows)))


def as_float32(tensor: Tensor) -> Tensor:
    """Returns a tensor of floats in float32, any other one as it is."""
    return tensor.float() if tensor.is_floating_point() else tensor


def compute(node: Node, read: Callable[[Node], Any]) -> Any:
    """Computes a node in float32.

    Args:
        node: a call of an operator.
        read: returns the value of a node that it reads.

    Raises:
        Exception: the operator fails.
    """
    args = fx.node.map_aggregate(fx.map_arg(node.args, read), _in_float32)
    kwargs = fx.node.map_aggregate(fx.map_arg(node.kwargs, read), _in_float32)
    return node.target(*args, **kwargs)  # type: ignore[operator,misc]


def _in_float32(argument: Any) -> Any:
    """Replaces a float dtype argument by float32; returns anything else unchanged."""
    return torch.float32 if argument in _FLOATS and isinstance(argument, torch.dtype) else argument


def evaluate(node: Node, values: dict[Node, Any], module: fx.GraphModule, rows: int) -> Any:
    """Computes a node in float32; see `compute`.

    Args:
        node: a call of an operator.
        values: results of other nodes.
        module: the graph's module, which holds the constants.
        rows: number of tokens.
    """

    def read(source: Node) -> Any:
        if source in values:
            return values[source]
        if source.op == "get_attr":
            return as_float32(module.get_buffer(str(source.target)))
        return number(source.meta["val"], rows)

    return compute(node, read)


def is_op(node: Any, *packets: Any) -> bool:
    """True if a node calls one of these operators, in any overload."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and getattr(node.target, "overloadpacket", None) in packets
    )


def tensor_of(node: Node) -> Tensor:
    """Returns the fake tensor of a node's result, which has its shape and dtype."""
    result = node.meta["val"]
    assert isinstance(result, Tensor), f"{node} is not a tensor"
    return result


def module_name(node: Node) -> str:
    """Returns path and class of the module whose code made a node, such as ``h.0.attn (GPTJAttention)``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the model"
    path, kind = stack[-1]
    short = str(kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1]
    path = str(path).removeprefix("L['self'].").removeprefix("base").removeprefix(".")
    return f"{path} ({short})" if path else short
