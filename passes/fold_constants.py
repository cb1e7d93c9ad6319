"""Constant folding: ``weight + 1``, position tables, converted norm weights."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, constant, is_op, match, new_constant, strip, value

MAX_VALUES = 1 << 20


def _folds(module: fx.GraphModule, node: Node) -> bool:
    if node.target is operator.getitem:  # one of the parts of a split constant
        source = OpCall(node).source
        return bool(source.all_input_nodes) and _computes_constant(module, source) and _is_kept(node)
    return _computes_constant(module, node) and isinstance(node.meta.get("val"), Tensor) and _is_kept(node)


_VIEWS = (
    *(aten.view.default, aten.transpose.int, aten.t.default, aten.permute.default, aten.unsqueeze.default),
    *(aten.squeeze.dim, aten.select.int, aten.slice.Tensor),
)


def _is_kept(node: Node) -> bool:
    """True if a result has a fixed size and is worth keeping: it is small, or has no memory of its own."""
    result: Tensor = node.meta["val"]
    fixed = all(isinstance(size, int) for size in result.shape)
    return fixed and (result.numel() <= MAX_VALUES or is_op(node, *_VIEWS))


def _computes_constant(module: fx.GraphModule, node: Node) -> bool:
    """True if an operator reads constants alone."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
        return False
    if node.target._schema.is_mutable:  # type: ignore[union-attr]
        return False
    inputs = node.all_input_nodes
    if any(constant(module, n) is None for n in inputs):
        return False
    return bool(inputs) or is_op(node, aten.arange) or (is_op(node, *_FILLED) and _is_only_read(node))


_FILLED = (aten.ones, aten.zeros, aten.full)


def _is_only_read(node: Node) -> bool:
    """True if no node writes to a tensor or views it: a constant must stay as it is."""
    schemas = [getattr(user.target, "_schema", None) for user in node.users]
    return all(
        schema is not None and not schema.is_mutable and all(r.alias_info is None for r in schema.returns)
        for schema in schemas
    )


def _shift_positions(module: fx.GraphModule, node: Node) -> bool:
    """Rewrites ``table[positions + n]`` to ``table[n:][positions]``."""
    look_up = OpCall(node)
    table = constant(module, look_up.weight)
    shifted = match(strip(look_up.indices, aten.to), aten.add.Tensor)
    if table is None or shifted is None or not isinstance(shifted.other, int):
        return False
    positions, offset = shifted.self, shifted.other
    if not isinstance(positions, Node) or positions.op != "placeholder" or offset < 0:
        return False
    if value(positions).dtype != torch.int64:
        return False
    look_up.replace(weight=new_constant(module, node, "positions", table[offset:]), indices=positions)
    return True


def _computed(module: fx.GraphModule, node: Node) -> Any:
    """Returns the result of a node whose inputs are constants, or are split from one."""
    if node.target is operator.getitem:
        source, index = node.args
        return _computed(module, source)[index]  # type: ignore[arg-type,index]
    args = fx.map_arg(node.args, lambda n: constant(module, n))
    kwargs = fx.map_arg(node.kwargs, lambda n: constant(module, n))
    return node.target(*args, **kwargs)  # type: ignore[operator]


@torch.no_grad()
def run(module: fx.GraphModule, context: PassContext) -> int:
    """Computes nodes whose inputs are constants."""
    num_rewritten = 0
    for node in list(module.graph.nodes):
        if is_op(node, aten.embedding.default):
            num_rewritten += _shift_positions(module, node)
        if not _folds(module, node):
            continue
        result = _computed(module, node)
        if result.numel() <= MAX_VALUES:
            result = result.contiguous()
        node.replace_all_uses_with(new_constant(module, node, "folded", result))
        module.graph.erase_node(node)
        num_rewritten += 1
    module.graph.eliminate_dead_code()
    return num_rewritten
