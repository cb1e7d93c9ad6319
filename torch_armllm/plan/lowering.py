"""The walk over a graph that writes the instructions of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.expression import (
    Expression,
    Unmappable,
    operands_of,
    parts_of,
    pointwise_fields,
    viewed,
)
from torch_armllm.plan.missing_operators import describe_missing, layer_of
from torch_armllm.plan.program import NOTHING, Field, Operand, Program, contiguous

STEP_INPUTS = ("input_ids", "position_ids", "slots", "block_table", "query_start", "seq_lens")
"""The first inputs of a native step, in order; the cache's tensors follow."""
_ENCODER_INPUTS = ("encoder_table", "encoder_starts", "encoder_lens")
"""Inputs that say where an encoder's tokens are, among those of the cache."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = ("", "add", "subtract", "maximum", "minimum")
"""Operators of positions and ids whose float32 results are exact."""
_LENGTH = "max_seq_len"
"""A number that a native step computes itself."""

Writer = Callable[..., Any]
"""Writes an operator's instruction: called with the lowering, the node and its arguments, returns the
location of the result."""


class Unlowerable(RuntimeError):
    """A node of the graph has no instruction; the graph runs node by node instead.

    The message says what the node does; `Lowering.lower` adds the layer to which it belongs.
    """


class NoInstruction(Unlowerable):
    """An operator has no instruction; others of the graph may have none either."""


def _is_call(node: Node) -> bool:
    """True if a node calls an operator whose results are tensors."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | tuple | list | None)


def _no_tokens(val: Tensor) -> Unlowerable:
    return Unlowerable(f"computes a tensor of shape {tuple(val.shape)}, which has no dimension of tokens")


class CacheLayer:
    """A layer of the cache: part of an input, not rows of tokens."""

    def __init__(self, number: int, layer: int) -> None:
        self.input, self.layer = number, layer


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
        """Operand of each result, or the expression that no instruction has computed yet."""
        self._leaves: dict[Operand, Expression] = {}
        """Expression of each operand; an instruction loads it once."""
        self._rows: dict[tuple[Node, int], Operand] = {}
        """Constants that elementwise programs read, and the dimensions of results behind that of tokens."""
        self._behind_tokens = 0
        """Dimensions behind that of tokens in the result that is being computed."""
        self._read: set[Node] = set()
        """Nodes whose expression became part of another one: no other node reads them."""
        tokens = (n.meta["val"].shape[1] for n in module.graph.nodes if n.name == "input_ids")
        self._tokens: Any = next(tokens, None)

    def token_dim(self, val: Tensor) -> tuple[int, int]:
        """Returns the dimension of a tensor that counts tokens, and its size for each token.

        Raises:
            Unlowerable: no dimension does, or several do.
        """
        found = [(d, n) for d, size in enumerate(val.shape) if (n := self._per_token(size)) is not None]
        if len(found) != 1:
            raise _no_tokens(val)
        return found[0]

    def _per_token(self, size: Any) -> int | None:
        """Returns how many entries a dimension has for each token; None for one of fixed size."""
        if isinstance(size, int):
            return None
        if self._tokens is None or size is self._tokens:
            return 1
        ratio = size.node.expr / self._tokens.node.expr
        return int(ratio) if ratio.is_Integer else None

    def inner_sizes(self, val: Tensor) -> tuple[int, ...]:
        """Returns the sizes of a tensor without its token dimension, and without a first one of size 1.

        Raises:
            Unlowerable: it is not rows of tokens.
        """
        dim, count = self.token_dim(val)
        before = [int(size) for size in val.shape[:dim]]
        if before[:1] == [1]:
            del before[0]
        if count > 1:
            if any(size != 1 for size in before):
                raise _no_tokens(val)
            before.append(count)
        return (*before, *(int(size) for size in val.shape[dim + 1 :]))

    def inner_dim(self, val: Tensor, dim: int) -> int | None:
        """Returns a dimension's index in `inner_sizes`; None for that of tokens and a first one of size 1."""
        token, _ = self.token_dim(val)
        dim %= val.dim()
        skipped = 1 if token > 0 and val.shape[0] == 1 else 0
        if dim == token or dim < skipped:
            return None
        return dim - skipped - (1 if dim > token else 0)

    def place(self, node: Any) -> Operand:
        """Returns the location of a node's result; the elements of a token may lie anywhere in a row."""
        operand = self.locations.get(node) if isinstance(node, Node) else None
        if isinstance(operand, Expression):
            operand = self.locations[node] = self.compute(operand)
        if not isinstance(operand, Operand):
            raise Unlowerable(f"reads {node}, which is no result for each token")
        return operand

    def heads(self, node: Any) -> Operand:
        """Returns the location of a node's result; its heads are contiguous and evenly spaced."""
        operand = self.place(node)
        if operand.strides and not (
            len(operand.inner) == 2 and operand.strides[1] == 1 <= operand.strides[0]
        ):
            return self.rows(node)
        return operand

    def rows(self, node: Any) -> Operand:
        """Returns the location of a node's result; each token is contiguous, by a copy if need be."""
        operand = self.place(node)
        if operand.strides:
            copy = Expression(operand.inner, operand.dtype, operand=operand)
            operand = self.locations[node] = self.compute(copy)
        return operand

    def read(self, node: Node) -> None:
        """Notes that the expression of a node became part of another one."""
        self._read.add(node)

    def expression(self, node: Any) -> Expression:
        """Returns a node's result as part of a larger expression."""
        location = self.locations.get(node)
        if isinstance(location, Expression):
            self.read(node)
            return location
        tensor = constant(self.module, node)
        operand = self.place(node) if tensor is None else self._shared_row(node, tensor)
        if operand.dtype not in (*FLOATS, torch.int64):
            raise Unlowerable(f"computes with {operand.dtype}, and plans compute with floats")
        if operand.space == "input" and not operand.stride:
            operand = replace(operand, stride=1)
        if operand not in self._leaves:
            self._leaves[operand] = Expression(operand.inner, operand.dtype, operand=operand)
        return self._leaves[operand]

    def _shared_row(self, node: Node, tensor: Tensor) -> Operand:
        """Returns a constant as a row that all tokens read."""
        key = node, self._behind_tokens
        if key not in self._rows:
            if not tensor.is_floating_point():
                raise Unlowerable("computes with a constant that does not hold floats")
            shape = list(tensor.shape)
            place = len(shape) - 1 - self._behind_tokens
            if place >= 0 and len(shape) > 1 and shape[place] == 1:
                del shape[place]  # it is repeated for each token
            for _ in range(2):
                if len(shape) > 1 and shape[0] == 1:
                    del shape[0]
            held = self.program.constant(tensor.contiguous())
            self._rows[key] = Operand(held.space, held.index, held.dtype, tuple(shape))
        return self._rows[key]

    def compute(self, expression: Expression, out: Operand | None = None) -> Operand:
        """Writes the instruction that computes an expression.

        Args:
            expression: to compute.
            out: columns of rows to write to; None: new rows.

        Raises:
            Unlowerable: one instruction cannot compute it, or its result is not of floats.
        """
        if expression.dtype not in FLOATS:
            raise Unlowerable(f"keeps a result of {expression.dtype}; those of plans are floats")
        if out is None:
            columns = math.prod(expression.inner)
            out = self.program.allocate(columns, expression.dtype, expression.inner)
        try:
            for part, place in parts_of(expression, out):
                self.emit("pointwise", **pointwise_fields(part, place))
        except Unmappable as reason:
            raise Unlowerable(str(reason)) from reason
        return out

    def weight(self, node: Any, dtype: torch.dtype | None = None) -> Operand:
        """Returns a constant, or `NOTHING` for None."""
        if node is None:
            return NOTHING
        tensor = self.held(node)
        if dtype is not None:
            tensor = tensor.to(dtype)
        if tensor.dim() < 2 and not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return self.program.constant(tensor)

    def held(self, node: Any) -> Tensor:
        """Returns the value of a constant."""
        tensor = constant(self.module, node)
        if tensor is None:
            raise Unlowerable("has a weight that is computed in each step")
        return tensor

    def constant_value(self, node: Any) -> float:
        """Returns a number, given as such or as a constant of one value."""
        tensor = constant(self.module, node)
        return float(node) if tensor is None else float(tensor.item())

    def new(self, node: Node, val: Tensor | None = None) -> Operand:
        """Allocates rows for a node's result."""
        val = node.meta["val"] if val is None else val
        inner = self.inner_sizes(val)
        columns = 1
        for n in inner:
            columns *= n
        return self.program.allocate(columns, val.dtype, inner)

    def emit(self, opcode: str, **fields: Field) -> None:
        """Writes an instruction, see `Program.emit`."""
        self.program.emit(opcode, **fields)

    def lower(self) -> Program:
        """Writes the program of the whole graph.

        Raises:
            Unlowerable: a node has no instruction; the message names its layer and what it does.
        """
        layer = "the model"
        for node in self.module.graph.nodes:
            layer = layer_of(node) or layer
            try:
                self._visit(node)
            except NoInstruction:
                calls = [n for n in self.module.graph.nodes if _is_call(n)]
                raise Unlowerable(describe_missing(calls, self.writers)) from None
            except Unlowerable as reason:
                raise Unlowerable(f"{layer} {reason}") from reason
        return self.program

    def _visit(self, node: Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            self._output(node.all_input_nodes[0])
        elif _is_call(node):
            self._call(node)

    def cache_layer(self, source: Node, layer: int) -> CacheLayer | None:
        """Returns a layer of one of the cache's tensors, or None if ``source`` is none of them."""
        if source.op != "placeholder" or source.name not in self.inputs[len(STEP_INPUTS) :]:
            return None
        return CacheLayer(self.inputs.index(source.name), layer)

    def _placeholder(self, node: Node) -> None:
        if node.name in (*STEP_INPUTS, *_ENCODER_INPUTS):
            self.locations[node] = Operand("input", self.inputs.index(node.name), node.meta["val"].dtype)

    def _output(self, node: Node) -> None:
        last = self.rows(node)
        if last.storage is None or last.column != 0 or last.width != last.storage.columns:
            raise Unlowerable("returns a part of what it computed last")
        self.program.outputs.append(last.storage)

    def _call(self, node: Node) -> None:
        lower = self.writers.get(node.target)
        if lower is None:
            raise NoInstruction(f"computes {node.target}")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._compute_pending()
        self._behind_tokens = self._dims_behind_tokens(node)
        result = lower(self, node, *node.args, **node.kwargs)
        if isinstance(result, Expression):
            if result.inner != self.inner_sizes(node.meta["val"]):
                raise Unlowerable("repeats an operand along the dimension of tokens")
            if result.dtype == torch.int64 and result.op not in _WHOLE:
                raise Unlowerable(f"computes whole numbers by {node.target}; plans compute with floats")
            if len(node.users) > 1 and result.dtype in FLOATS:
                result = self.compute(result)
        if result is not None:
            self.locations[node] = result

    def _dims_behind_tokens(self, node: Node) -> int:
        """Returns the number of dimensions behind that of tokens; more than there are if there is none."""
        val = node.meta["val"]
        sizes = [self._per_token(size) is not None for size in val.shape] if isinstance(val, Tensor) else []
        return len(sizes) - 1 - sizes.index(True) if sizes.count(True) == 1 else len(sizes)

    def _compute_pending(self) -> None:
        """Computes the expressions that later nodes read: they may read what the next operator overwrites."""
        for node, location in list(self.locations.items()):
            pending = isinstance(location, Expression) and node not in self._read
            if pending and location.dtype in FLOATS:
                self.locations[node] = self.compute(location)

    def compares(self, place: Operand) -> bool:
        """True if a comparison of rows is still to be computed, which no instruction can do on its own."""
        return any(
            isinstance(location, Expression)
            and location.dtype not in FLOATS
            and any(operand.storage is place.storage for operand in operands_of(location))
            and any(user not in self.locations for user in node.users)
            for node, location in self.locations.items()
        )

    def same_rows(self, node: Node, source: Any) -> Operand:
        """Returns the rows of another node, viewed with this node's sizes."""
        rows = self.place(source)
        before, after = source.meta["val"], node.meta["val"]
        inner = self.inner_sizes(after)
        if before.shape != after.shape and not self._keeps_tokens(before, after):
            raise Unlowerable("merges tokens and features into one dimension")
        steps = viewed(rows.inner, rows.steps, inner)
        if steps is None:
            rows = self.rows(source)
            steps = contiguous(inner)
        if math.prod(inner) != rows.width:
            raise Unlowerable("merges tokens and features into one dimension")
        return rows.view(inner, steps)

    def _keeps_tokens(self, before: Tensor, after: Tensor) -> bool:
        """True if a view has as many elements in front of each token as the tensor that it shows."""
        sizes = []
        for val in (before, after):
            dim, count = self.token_dim(val)
            sizes.append(math.prod(int(n) for n in val.shape[:dim]))
            if count > 1 and sizes[-1] > 1:
                return False
        return sizes[0] == sizes[1]

    def sized(self, node: Node, location: Any) -> Any:
        """Returns a location without dimensions of size 1 that the sizes of a node's tokens lack.

        Raises:
            Unlowerable: other dimensions differ too.
        """
        inner = self.inner_sizes(node.meta["val"])
        if location.inner == inner:
            return location
        steps = viewed(location.inner, location.steps, inner) if isinstance(location, Operand) else None
        if steps is None:
            raise Unlowerable("merges tokens and features into one dimension")
        return location.view(inner, steps)
