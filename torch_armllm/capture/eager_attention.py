"""Marker ops in place of attention that a model computes by matrix products and a softmax.

Such models do not call transformers' attention interface.  Their attention is recognized in the graph by what
it computes: a softmax over tokens, with the product of queries and keys before it, and values after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Node

from torch_armllm.capture.attention_operands import (
    VIEWS,
    by_head,
    insert_call,
    insert_constant,
    untransposed,
    unwidened,
)
from torch_armllm.capture.attention_probe import Parameters, Sizes, find_parameters
from torch_armllm.capture.markers.attention import UnsupportedAttention
from torch_armllm.capture.probing import evaluate, is_op, is_size, module_name, number, tensor_of
from torch_armllm.ops.op_call import OpCall, in_order

IMPLEMENTATION = "eager"
"""transformers' attention that computes its masks and products in plain operators."""

_aten = torch.ops.aten
_MATMULS = (_aten.matmul, _aten.bmm)
_PRODUCTS = (*_MATMULS, _aten.baddbmm)
_ARITHMETIC = (
    *(_aten.add, _aten.sub, _aten.rsub, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.eq, _aten.ne),
    *(_aten.tril, _aten.triu, _aten.tril_, _aten.triu_),
)
_LAYERS = (_aten.linear, _aten.addmm, _aten.layer_norm, _aten.convolution)
_LEARNED_BIAS = (
    "adds a learned bias to its scores, which a layer computes; fused attention has biases of the tokens' "
    "distance only"
)
_ASSERTIONS = (_aten._assert_tensor_metadata, _aten._assert_scalar, _aten.sym_constrain_range_for_size)
_LARGEST_WINDOW = 1 << 16


def mark_attention(module: fx.GraphModule) -> int:
    """Replaces every attention of a graph by the marker op; the markers are numbered in the graph's order.

    Args:
        module: a captured graph of ``input_ids`` and ``position_ids``, changed in place.

    Returns:
        The number of attentions replaced.

    Raises:
        UnsupportedAttention: no plan computes what a softmax over tokens is for; the message names its
            module.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if is_op(node, *_ASSERTIONS):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    softmaxes = [n for n in graph.nodes if is_op(n, _aten.softmax, _aten._softmax) and _is_square(n)]
    for layer, softmax in enumerate(softmaxes):
        try:
            attention = _Attention(module, softmax)
            attention.replace(attention.parameters(), layer)
        except UnsupportedAttention as error:
            raise UnsupportedAttention(f"{module_name(softmax)} {error}") from None
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return len(softmaxes)


def number_layers(module: fx.GraphModule) -> None:
    """Numbers the attentions of a graph in its order."""
    target = torch.ops.armllm.attention.default
    for layer, node in enumerate(n for n in module.graph.nodes if n.target is target):
        node.update_arg(3, layer)


def _is_square(node: Node) -> bool:
    """True if the last two dimensions of a node's result are the number of tokens."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    rows, columns = value.shape[-2:]
    return isinstance(columns, torch.SymInt) and statically_known_true(rows == columns)


class _Attention:
    """An attention in a graph, around its softmax.

    Raises:
        UnsupportedAttention: there are no queries, keys or values around it.
    """

    def __init__(self, module: fx.GraphModule, softmax: Node) -> None:
        self.module = module
        self.result = _weighted_sum(softmax)
        scores = _scores(softmax)
        self.q, self.k = _operands(scores)
        self.v = _operands(self.result)[1]
        heads, value_size = _heads_of(self.result)
        self.sizes = Sizes(heads, _heads_of(self.q)[1], value_size)
        if any(_heads_of(x)[0] != heads for x in (self.q, self.k)):
            raise UnsupportedAttention("has other numbers of heads in its scores and in its result")
        self.nodes = self._between()
        constants = {s for n in self.nodes for s in n.all_input_nodes if s.op == "get_attr"}
        self.constants = [module.get_buffer(str(n.target)) for n in constants]

    def _between(self) -> list[Node]:
        """Returns the nodes from queries, keys and values to the result, in order."""
        inputs = {self.q, self.k, self.v}
        nodes: set[Node] = set()
        pending = [self.result]
        while pending:
            node = pending.pop()
            if node in inputs or node in nodes or node.op != "call_function" or is_size(node):
                continue
            if not hasattr(node.target, "_schema"):
                raise UnsupportedAttention("splits its scores")
            nodes.add(node)
            pending += node.all_input_nodes
        return [node for node in self.module.graph.nodes if node in nodes]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> tuple[Tensor, list[Any]]:
        """Computes the result of queries, keys and values ``(1, heads, T, …)``, and all values on the way.

        The seed draws the token ids and the first position, on which nothing may depend.
        """
        length = q.shape[2]
        ids = torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(seed, seed + length)[None]
        values: dict[Node, Any] = {
            node: ids if node.name == "input_ids" else positions
            for node in self.module.graph.nodes
            if node.op == "placeholder"
        }
        for node, tensor in ((self.q, q), (self.k, k.transpose(2, 3)), (self.v, v)):
            values[node] = tensor.reshape([number(size, length) for size in tensor_of(node).shape])
        for node in self.nodes:
            values[node] = evaluate(node, values, self.module, length)
        return values[self.result].reshape(1, self.sizes.heads, length, -1), list(values.values())

    def parameters(self) -> Parameters:
        """Returns the parameters of the attention.

        Raises:
            UnsupportedAttention: no plan computes it.
        """
        looks_up = any(is_op(node, _aten.embedding) for node in self.nodes)
        try:
            found = find_parameters(self, self.sizes, self._window_sizes(), self._factors())
        except UnsupportedAttention:
            if looks_up:
                raise UnsupportedAttention(_LEARNED_BIAS) from None
            raise
        except Exception as error:  # noqa: BLE001 - any operator may fail outside of its graph
            raise UnsupportedAttention(f"has scores that cannot be computed apart: {error}") from error
        if looks_up and not found.ahead:
            raise UnsupportedAttention(_LEARNED_BIAS)
        return found

    def _window_sizes(self) -> set[int]:
        """Returns the integers that may be a window's size, as far as constant masks and biases reach."""
        found = {abs(a) for a in self._numbers(*_ARITHMETIC)}
        found |= {width for tensor in self.constants for width in _band_of(tensor)}
        room = min([_LARGEST_WINDOW, *(t.shape[-1] - 2 for t in self.constants if t.dim() > 1 < t.shape[-1])])
        return {min(int(n), room) for n in found if 1 < n <= _LARGEST_WINDOW and int(n) == n}

    def _factors(self) -> set[float]:
        """Returns the numbers by which scores are multiplied or divided."""
        return self._numbers(_aten.mul, _aten.div, *_PRODUCTS)

    def _numbers(self, *packets: Any) -> set[float]:
        """Returns the numbers among the arguments of some operators."""
        nodes = [node for node in self.nodes if is_op(node, *packets)]
        arguments: list[Any] = [a for n in nodes for a in (*n.args, *n.kwargs.values())]
        return {a for a in arguments if type(a) in (int, float)}

    def replace(self, parameters: Parameters, layer: int) -> None:
        """Puts the marker op in place of the result."""
        graph, target = self.module.graph, torch.ops.armllm.attention.default
        arguments = {
            name: insert_constant(self.module, self.result, name, x) if isinstance(x, Tensor) else x
            for name, x in vars(parameters).items()
        }
        with graph.inserting_before(self.result):
            v = by_head(graph, self.v)
            keys = untransposed(graph, self.k)
            q, k = (by_head(graph, unwidened(x, tensor_of(v).dtype)) for x in (self.q, keys))
            arguments |= {"q": q, "k": k, "v": v, "layer": layer}
            out = insert_call(graph, target, *in_order(target, arguments))
            out = insert_call(graph, _aten.transpose.int, out, 1, 2)
            for user in list(self.result.users):
                if is_op(user, *VIEWS) and tensor_of(user).shape == tensor_of(out).shape:
                    user.replace_all_uses_with(out)
                    graph.erase_node(user)
            if tensor_of(self.result).dim() == 3:
                out = insert_call(graph, _aten.squeeze.dim, out, 0)
        self.result.replace_all_uses_with(out)
        for node in reversed(self.nodes):  # dropout and in-place operators are no dead code to torch
            if not node.users and not _writes_for_others(node):
                graph.erase_node(node)


def _weighted_sum(softmax: Node) -> Node:
    """Returns the product of a softmax and the values."""
    node = softmax
    while len(node.users) == 1:
        user = next(iter(node.users))
        if is_op(user, *_MATMULS) and OpCall(user).self is node:
            return user
        if not _is_square(user):
            break
        node = user
    raise UnsupportedAttention("uses its attention weights for something else than a sum of values")


def _scores(softmax: Node) -> Node:
    """Returns the product of queries and keys in front of a softmax."""
    found: dict[Node, None] = {}
    visited: set[Node] = set()
    pending = [softmax]
    while pending:
        node = pending.pop()
        if node in visited or node.op != "call_function" or is_size(node):
            continue
        visited.add(node)
        if is_op(node, *_LAYERS):
            raise UnsupportedAttention(_LEARNED_BIAS)
        is_product = is_op(node, *_PRODUCTS) and _is_square(node)
        if is_product:
            found[node] = None
        inputs: Any = node.all_input_nodes if not is_product else node.args[: len(node.args) - 2]
        pending += inputs
    if len(found) != 1:
        raise UnsupportedAttention(
            f"adds {len(found)} products to its scores, instead of one of queries and keys"
        )
    return next(iter(found))


def _operands(product: Node) -> tuple[Node, Node]:
    """Returns the two factors of a matrix product."""
    args: Any = product.args
    return args[-2], args[-1]


def _heads_of(node: Node) -> tuple[int, Any]:
    """Returns the number of heads and the last dimension of a node's result; for keys, that is ``T``."""
    *batch, _, columns = tensor_of(node).shape
    if any(isinstance(size, torch.SymInt) for size in batch):
        raise UnsupportedAttention("computes its scores from other shapes than heads and tokens")
    heads = 1
    for size in batch:
        heads *= int(size)
    return heads, columns


def _band_of(tensor: Tensor) -> set[int]:
    """Returns the width of a constant mask's band; empty for other constants."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return set()
    last = tensor.reshape(-1, tensor.shape[-1])[-1]
    width = int((last == last[-1]).sum())
    return {width} if width < len(last) else set()


def _writes_for_others(node: Node) -> bool:
    """True if a node writes into a tensor that other nodes read too."""
    target, source = node.target, node.args[0] if node.args else None
    mutable = getattr(target, "_schema", None) is not None and target._schema.is_mutable  # type: ignore[union-attr]
    return bool(mutable and isinstance(source, Node) and len(source.users) > 1)
