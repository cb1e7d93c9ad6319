"""Instructions of fused ops, whose fields are the ops' arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.ops.tables import INSTRUCTIONS
from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.lowering import CacheLayer, Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Field, Operand

CallWriter = Callable[[Lowering, OpCall], Any]
"""Writes an op's instruction; returns the location of its result."""


def writers(by_op: Mapping[Any, CallWriter]) -> dict[Any, Writer]:
    """Returns writers that are called with a node and its arguments, for ones that read them by name."""
    return {op: _by_name(writer) for op, writer in by_op.items()}


def _by_name(writer: CallWriter) -> Writer:
    def write(low: Lowering, node: Node, *_: Any, **__: Any) -> Any:
        return writer(low, OpCall(node))

    return write


def write_call(
    low: Lowering, call: OpCall, opcode: str, dtype: torch.dtype | None = None, /, **fields: Field
) -> Operand:
    """Writes an op's instruction.

    A field that is not given is the op's argument of the same name.  Of tensors, a view is a constant, rows
    of tokens or nothing, and an integer is the number of a step's input.  Rows of the result are allocated
    if ``out`` is not given.

    Args:
        low: the lowering.
        call: of the op.
        opcode: of the instruction.
        dtype: of constants that are views; None: as they are.
        fields: that are something else than the arguments.

    Returns:
        The result; `NOTHING` of an instruction without one.
    """
    for entry in INSTRUCTIONS[opcode].fields:
        if entry.name not in fields and entry.name != "out":
            value = getattr(call, entry.name)
            fields[entry.name] = _view(low, value, dtype) if entry.kind == "view" else _number(low, value)
    if "out" not in fields and any(entry.name == "out" for entry in INSTRUCTIONS[opcode].fields):
        fields["out"] = low.new(call.node)
    low.emit(opcode, **fields)
    out = fields.get("out", NOTHING)
    assert isinstance(out, Operand)
    return out


def _view(low: Lowering, value: Any, dtype: torch.dtype | None) -> Operand:
    if value is None:
        return NOTHING
    return low.rows(value) if constant(low.module, value) is None else low.weight(value, dtype)


def _number(low: Lowering, value: Any) -> Any:
    if not isinstance(value, Node):
        return value
    if value.name not in low.inputs:
        raise Unlowerable(f"reads {value}, which is no input of a step")
    return low.inputs.index(value.name)


def cache_layer(low: Lowering, cache: Any) -> CacheLayer:
    """Returns the layer of the cache that a node is.

    Raises:
        Unlowerable: it is something else.
    """
    layer = low.locations.get(cache)
    if not isinstance(layer, CacheLayer):
        raise Unlowerable("reads entries or states that are no layer of the cache")
    return layer


def layer_fields(low: Lowering, cache: Any) -> dict[str, int]:
    """Returns the fields of a layer of a cache of one tensor: number of its input, and of the layer."""
    layer = cache_layer(low, cache)
    return {"cache": layer.input, "layer": layer.layer}


def select_writer(opcode: str) -> CallWriter:
    """Returns the writer of an indexer's op, which selects what a layer attends to by queries and keys."""

    def select(low: Lowering, call: OpCall) -> Operand:
        queries = low.heads(call.q)
        heads, head_size = queries.inner[-2:]
        sizes = {"heads": heads, "head_size": head_size, "head_stride": queries.head_stride}
        return write_call(low, call, opcode, q=queries, **layer_fields(low, call.keys), **sizes)

    return select


def cache_fields(low: Lowering, call: OpCall) -> dict[str, int]:
    """Returns the fields of a cache: numbers of its inputs, -1 for scales that it lacks, and its layer."""
    keys = cache_layer(low, call.k_cache)
    tensors = {name: getattr(call, name) for name in ("v_cache", "k_scales", "v_scales")}
    others = {name: -1 if t is None else cache_layer(low, t).input for name, t in tensors.items()}
    return {"k_cache": keys.input, "layer": keys.layer, **others}
