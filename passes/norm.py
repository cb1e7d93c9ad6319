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

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    is_op,
    is_weight,
    match,
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
    if (added := match(other, aten.add.Tensor, other=1)) is not None:
        other, offset = strip(added.self, *CONVERSIONS), 1.0
    if not is_weight(other) or value(other).dim() != 1 or value(other).shape[0] != value(node).shape[-1]:
        return None
    return user, other, offset


def _skip_conversion(node: Node) -> Node:
    user = only_user(node)
    return user if user is not None and is_op(user, *CONVERSIONS) else node


def _centered(wide: Any) -> Node | None:
    """Matches ``x − mean(x)``; returns x."""
    difference = match(wide, aten.sub.Tensor)
    mean = None if difference is None else match(difference.other, aten.mean.dim, dim=[-1], keepdim=True)
    if difference is None or mean is None or mean.self is not difference.self:
        return None
    assert isinstance(mean.self, Node)
    return mean.self


def _is_same(a: Any, b: Any) -> bool:
    """True if two nodes are identical, or subtract the same mean from the same node."""
    return a is b or (_centered(a) is not None and _centered(a) is _centered(b))


def _is_rsqrt(node: Node) -> bool:
    return match(node, aten.pow.Tensor_Scalar, exponent=-0.5) is not None or is_op(node, aten.rsqrt.default)


def _is_power_of_two(node: Any) -> bool:
    return match(node, aten.pow.Tensor_Scalar, exponent=2) is not None


def _match_rms(rsqrt: Node) -> _RmsNorm | None:
    add = match(OpCall(rsqrt).self, aten.add.Tensor)
    mean = None if add is None else match(add.self, aten.mean.dim, dim=[-1], keepdim=True)
    if add is None or mean is None or not isinstance(add.other, float):
        return None
    square: Any = mean.self
    if not (is_op(square, aten.square.default) or _is_power_of_two(square)):
        return None
    wide: Any = OpCall(square).self
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
    return _RmsNorm(x, weight, offset, add.other, last, centered is not None)


def _ones(module: fx.GraphModule, before: Node, x: torch.Tensor) -> Node:
    return new_constant(module, before, "norm_ones", torch.ones(x.shape[-1], dtype=x.dtype))


def _replace(module: fx.GraphModule, last: Node, target: Any, *args: Any) -> None:
    with module.graph.inserting_before(last):
        last.replace_all_uses_with(call(module.graph, target, *args))


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all recognized norms."""
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
        elif is_op(node, aten.rms_norm.default) and len(OpCall(node).normalized_shape) == 1:
            norm = OpCall(node)
            eps = torch.finfo(value(node).dtype).eps if norm.eps is None else norm.eps
            weight = norm.weight or _ones(module, node, value(node))
            _replace(module, node, torch.ops.armllm.rms_norm.default, norm.input, weight, eps, 0.0)
        elif is_op(node, aten.layer_norm.default) and len(OpCall(node).normalized_shape) == 1:
            norm = OpCall(node)
            options = norm.weight, norm.bias, norm.eps
            _replace(module, node, torch.ops.armllm.layer_norm.default, norm.input, *options)
        else:
            continue
        num_rewritten += 1
    module.graph.eliminate_dead_code()
    return num_rewritten
