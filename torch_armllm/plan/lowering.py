"""The walk over a graph that writes the instructions of its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.program import NOTHING, Field, Operand, Program

STEP_INPUTS = ("input_ids", "position_ids", "slots", "block_table", "query_start", "seq_lens")
"""The first inputs of a native step, in order; the cache's tensors follow."""
_LENGTH = "max_seq_len"
"""A number that a native step computes itself."""

Writer = Callable[..., Any]
"""Writes an operator's instruction: called with the lowering, the node and its arguments, returns the
location of the result."""


class Unlowerable(RuntimeError):
    """A node of the graph has no instruction; the graph runs node by node instead."""


class CacheLayer:
    """A layer of the cache: part of an input, not rows of tokens."""

    def __init__(self, number: int, layer: int) -> None:
        self.input, self.layer = number, layer


def inner_sizes(val: Tensor) -> tuple[int, ...]:
    """Returns the sizes after the token dimension: the first, or the second if the first has size 1."""
    skip = 2 if val.dim() >= 2 and isinstance(val.shape[0], int) and val.shape[0] == 1 else 1
    sizes = tuple(val.shape[skip:])
    if not all(isinstance(s, int) for s in sizes):
        raise Unlowerable(f"a tensor of shape {tuple(val.shape)} is not rows of tokens")
    return sizes


class Lowering:
    """State of a lowering: the program, and the location of each node's result.

    Args:
        module: the graph.
        writers: for each operator the function that writes its instruction.
    """

    def __init__(self, module: fx.GraphModule, writers: Mapping[Any, Writer]) -> None:
        self.module = module
        self.writers = writers
        self.program = Program()
        self.inputs = [n.name for n in module.graph.nodes if n.op == "placeholder" and n.name != _LENGTH]
        """Names of a native step's inputs."""
        self.locations: dict[Node, Any] = {}

    def heads(self, node: Any) -> Operand:
        """Returns the location of a node's result; its heads need not be contiguous."""
        operand = self.locations.get(node) if isinstance(node, Node) else None
        if not isinstance(operand, Operand):
            raise Unlowerable(f"{node} is not rows of tokens")
        return operand

    def rows(self, node: Any) -> Operand:
        """Returns the location of a node's result; each token is contiguous."""
        operand = self.heads(node)
        if operand.strided_heads:
            raise Unlowerable(f"the heads of {node} are not contiguous")
        return operand

    def weight(self, node: Any, dtype: torch.dtype | None = None) -> Operand:
        """Returns a constant, or `NOTHING` for None."""
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
        """Returns a number, given as such or as a constant of one value."""
        tensor = constant(self.module, node)
        return float(node) if tensor is None else float(tensor.item())

    def new(self, node: Node, val: Tensor | None = None) -> Operand:
        """Allocates rows for a node's result."""
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
        """Writes the program of the whole graph."""
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
        """Returns a layer of one of the cache's tensors, or None if ``source`` is none of them."""
        if source.op != "placeholder" or source.name not in self.inputs[len(STEP_INPUTS) :]:
            return None
        return CacheLayer(self.inputs.index(source.name), layer)

    def _placeholder(self, node: Node) -> None:
        if node.name in STEP_INPUTS:
            self.locations[node] = Operand("input", self.inputs.index(node.name), node.meta["val"].dtype)

    def _output(self, node: Node) -> None:
        last = self.rows(node)
        if last.storage is None or last.column != 0 or last.width != last.storage.columns:
            raise Unlowerable("the graph's result is not the whole output of an instruction")
        self.program.outputs.append(last.storage)

    def _call(self, node: Node) -> None:
        lower = self.writers.get(node.target)
        if lower is None:
            raise Unlowerable(f"no instruction for {node.target}")
        result = lower(self, node, *node.args, **node.kwargs)
        if result is not None:
            self.locations[node] = result

    def same_rows(self, node: Node, source: Any) -> Operand:
        """Returns the rows of another node, viewed with this node's sizes."""
        rows = self.heads(source)
        inner = inner_sizes(node.meta["val"])
        if rows.strided_heads and inner == rows.inner:
            return rows
        rows = self.rows(source)
        view = Operand(rows.space, rows.index, rows.dtype, inner, rows.column, rows.stride, rows.storage)
        if view.width != rows.width:
            raise Unlowerable(f"{node} mixes tokens and features")
        return view
