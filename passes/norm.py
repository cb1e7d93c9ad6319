"""Norms, recognized by their computation, never by a class name.

``x · rsqrt(mean(x²) + eps)``, optionally multiplied by ``w`` or ``1 + w``, becomes ``rms_norm``;
``aten.layer_norm`` becomes ``layer_norm``; ``aten.rms_norm`` (``torch.nn.RMSNorm``) becomes ``rms_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    is_op,
    is_weight,
    new_constant,
    only_user,
    other_operand,
    strip,
    unwidened,
    value,
)


@dataclass
class _RmsNorm:
    x: Node
    weight: Node | None
    """None: ones"""
    offset: float
    eps: float
    last: Node
    centered: bool
    """True if the mean is subtracted first, as in a LayerNorm without bias."""


def _scaled_by_weight(node: Node) -> tuple[Node, Node, float] | None:
    """Matches ``node · w`` or ``node · (1 + w)``; returns the product, the node of w, and the offset."""
    user = only_user(node)
    if user is None or not is_op(user, aten.mul.Tensor):
        return None
    other = strip(other_operand(user, node), *CONVERSIONS)
    offset = 0.0
    if is_op(other, aten.add.Tensor) and other.args[1] in (1, 1.0):
        other, offset = strip(other.args[0], *CONVERSIONS), 1.0
    if not is_weight(other) or value(other).dim() != 1 or value(other).shape[0] != value(node).shape[-1]:
        return None
    return user, other, offset


def _skip_conversion(node: Node) -> Node:
    user = only_user(node)
    return user if user is not None and is_op(user, *CONVERSIONS) else node


def _centered(wide: Any) -> Node | None:
    """Matches ``x − mean(x)``; returns x."""
    if not is_op(wide, aten.sub.Tensor):
        return None
    x, mean = wide.args[:2]
    if (
        is_op(mean, aten.mean.dim)
        and mean.args[0] is x
        and list(mean.args[1]) == [-1]
        and mean.args[2] is True
    ):
        assert isinstance(x, Node)
        return x
    return None


def _is_same(a: Any, b: Any) -> bool:
    """True if two nodes are identical, or subtract the same mean from the same node."""
    return a is b or (_centered(a) is not None and _centered(a) is _centered(b))


def _is_rsqrt(node: Node) -> bool:
    if is_op(node, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == -0.5)
    return is_op(node, aten.rsqrt.default)


def _is_power_of_two(node: Any) -> bool:
    return is_op(node, aten.pow.Tensor_Scalar) and bool(node.args[1] == 2)


def _match_rms(rsqrt: Node) -> _RmsNorm | None:
    add = rsqrt.args[0]
    if not is_op(add, aten.add.Tensor) or not isinstance(add.args[1], float):
        return None
    mean: Any = add.args[0]
    if not is_op(mean, aten.mean.dim) or list(mean.args[1]) != [-1] or mean.args[2] is not True:
        return None
    square: Any = mean.args[0]
    if not (is_op(square, aten.square.default) or _is_power_of_two(square)):
        return None
    wide: Any = square.args[0]
    root = _skip_conversion(rsqrt)
    product = only_user(root)
    if product is None or not is_op(product, aten.mul.Tensor):
        return None
    scaled_rows = other_operand(product, root)
    if scaled_rows is unwidened(wide) and value(product).dtype == value(scaled_rows).dtype:
        wide = scaled_rows  # the factor alone is computed in float32
    if not _is_same(scaled_rows, wide):
        return None
    centered = _centered(wide)
    x = unwidened(wide if centered is None else centered)
    scaled = _scaled_by_weight(_skip_conversion(product))
    last, weight, offset = scaled or (product, None, 0.0)
    narrowed = _skip_conversion(last)
    if value(narrowed).dtype == value(x).dtype:
        last = narrowed
    elif value(last).dtype == value(wide).dtype and centered is None:
        x = wide  # a gate follows before the result is rounded
    else:
        return None
    if centered is not None and offset:
        return None
    return _RmsNorm(x, weight, offset, float(add.args[1]), last, centered is not None)


def _ones(module: fx.GraphModule, before: Node, x: torch.Tensor) -> Node:
    return new_constant(module, before, "norm_ones", torch.ones(x.shape[-1], dtype=x.dtype))


def _replace(module: fx.GraphModule, last: Node, target: Any, *args: Any) -> None:
    with module.graph.inserting_before(last):
        last.replace_all_uses_with(call(module.graph, target, *args))


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all recognized norms.

    Returns:
        The number of norms rewritten.
    """
    num_rewritten = 0
    for node in list(module.graph.nodes):
        if _is_rsqrt(node):
            match = _match_rms(node)
            if match is None:
                continue
            weight = match.weight or _ones(module, match.last, value(match.x))
            if match.centered:
                layer_norm = torch.ops.armllm.layer_norm.default
                _replace(module, match.last, layer_norm, match.x, weight, None, match.eps)
            else:
                rms_norm = torch.ops.armllm.rms_norm.default
                _replace(module, match.last, rms_norm, match.x, weight, match.eps, match.offset)
        elif is_op(node, aten.rms_norm.default) and len(node.args) >= 3 and len(node.args[1]) == 1:
            eps = node.args[3] if len(node.args) > 3 else None
            if eps is None:
                eps = torch.finfo(value(node).dtype).eps
            weight = node.args[2] or _ones(module, node, value(node))
            _replace(module, node, torch.ops.armllm.rms_norm.default, node.args[0], weight, eps, 0.0)
        elif is_op(node, aten.layer_norm.default) and len(node.args[1]) == 1:
            weight, bias, eps = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
            _replace(module, node, torch.ops.armllm.layer_norm.default, node.args[0], weight, bias, eps)
        else:
            continue
        num_rewritten += 1
    module.graph.eliminate_dead_code()
    return num_rewritten
