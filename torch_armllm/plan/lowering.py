"""The walk over a graph that turns its nodes into the instructions of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.program import NOTHING, Field, Operand, Program

STEP_INPUTS = ("input_ids", "position_ids", "slots", "block_table", "query_start", "seq_lens")
"""Tensors that a native step takes first, in order; those of the cache follow."""
_LENGTH = "max_seq_len"
"""A number, which a native step finds out itself."""

Writer = Callable[..., Any]
"""Writes an operator's instruction: takes the lowering, the node and its arguments; returns where its result
lies."""


class Unlowerable(RuntimeError):
    """A node of the graph has no instruction; the graph runs node by node instead."""


class CacheLayer:
    """A layer of the cache, which is an input rather than rows of tokens."""

    def __init__(self, number: int, layer: int) -> None:
        self.input, self.layer = number, layer


def inner_sizes(val: Tensor) -> tuple[int, ...]:
    """Sizes behind the token dimension, which is the first, or the second after a 1."""
    skip = 2 if val.dim() >= 2 and isinstance(val.shape[0], int) and val.shape[0] == 1 else 1
    sizes = tuple(val.shape[skip:])
    if not all(isinstance(s, int) for s in sizes):
        raise Unlowerable(f"a tensor of shape {tuple(val.shape)} is not rows of tokens")
    return sizes


class Lowering:
    """What is known of a graph's nodes while its program is written.

    ``writers`` holds for each operator the function that writes its instruction: it is called with the
    lowering, the node and the node's arguments, and returns where the result lies.
    """

    def __init__(self, module: fx.GraphModule, writers: Mapping[Any, Writer]) -> None:
        self.module = module
        self.writers = writers
        self.program = Program()
        self.inputs = [n.name for n in module.graph.nodes if n.op == "placeholder" and n.name != _LENGTH]
        """Names of what a native step takes."""
        self.known: dict[Node, Any] = {}

    def heads(self, node: Any) -> Operand:
        """Returns the location of a node's result; its heads need not be contiguous."""
        found = self.known.get(node) if isinstance(node, Node) else None
        if not isinstance(found, Operand):
            raise Unlowerable(f"{node} is not rows of tokens")
        return found

    def rows(self, node: Any) -> Operand:
        """Where a node's result lies, a token in one piece."""
        found = self.heads(node)
        if found.strided_heads:
            raise Unlowerable(f"the heads of {node} are not contiguous")
        return found

    def weight(self, node: Any, dtype: torch.dtype | None = None) -> Operand:
        """A constant, or `NOTHING` for None."""
        if node is None:
            return NOTHING
        tensor = constant(self.module, node)
        if tensor is None:
            raise Unlowerable(f"{node} is not a constant")
        if dtype is not None:
            tensor = tensor.to(dtype)
        if tensor.dim() < 2 and not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return self.program.constant(tensor)

    def constant_value(self, node: Any) -> float:
        """A number, given as such or as a constant of one value."""
        tensor = constant(self.module, node)
        return float(node) if tensor is None else float(tensor.item())

    def new(self, node: Node, val: Tensor | None = None) -> Operand:
        """Rows for what a node makes."""
        val = node.meta["val"] if val is None else val
        inner = inner_sizes(val)
        columns = 1
        for n in inner:
            columns *= n
        return self.program.allocate(columns, val.dtype, inner)

    def emit(self, opcode: str, **fields: Field) -> None:
        """Writes an instruction, see `Program.emit`."""
        self.program.emit(opcode, **fields)

    def run(self) -> Program:
        """Walks over the whole graph."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._output(node.args[0])
            elif node.op == "call_function" and isinstance(
                node.meta.get("val"), Tensor | tuple | list | None
            ):
                self._call(node)
        return self.program

    def cache_layer(self, source: Node, layer: int) -> CacheLayer | None:
        """A layer of one of the cache's tensors; None: ``source`` is none of them."""
        if source.op != "placeholder" or source.name not in self.inputs[len(STEP_INPUTS) :]:
            return None
        return CacheLayer(self.inputs.index(source.name), layer)

    def _placeholder(self, node: Node) -> None:
        if node.name in STEP_INPUTS:
            self.known[node] = Operand("input", self.inputs.index(node.name), node.meta["val"].dtype)

    def _output(self, node: Node) -> None:
        last = self.rows(node)
        if last.storage is None or last.column != 0 or last.width != last.storage.columns:
            raise Unlowerable("the graph's result is not made by an instruction of its own")
        self.program.outputs.append(last.storage)

    def _call(self, node: Node) -> None:
        lower = self.writers.get(node.target)
        if lower is None:
            raise Unlowerable(f"no instruction for {node.target}")
        result = lower(self, node, *node.args, **node.kwargs)
        if result is not None:
            self.known[node] = result

    def same_rows(self, node: Node, source: Any) -> Operand:
        """The rows of another node, seen with this one's sizes."""
        rows = self.heads(source)
        inner = inner_sizes(node.meta["val"])
        if rows.strided_heads and inner == rows.inner:
            return rows
        rows = self.rows(source)
        view = Operand(rows.space, rows.index, rows.dtype, inner, rows.column, rows.stride, rows.storage)
        if view.width != rows.width:
            raise Unlowerable(f"{node} mixes tokens and features")
        return view
