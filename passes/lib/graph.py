"""Tools of the passes: inspect nodes, insert calls, read and replace constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall, in_order

aten = torch.ops.aten
CONVERSIONS = (aten.to, aten.type_as, aten._to_copy)


def is_op(node: Any, *targets: Any) -> bool:
    """True if ``node`` calls one of these operators (overloads or packets)."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return node.target in targets or (packet is not None and packet in targets)


def match(node: Any, *targets: Any, **arguments: Any) -> OpCall | None:
    """Returns the call of a node; None unless it calls one of the operators with these arguments."""
    if not is_op(node, *targets):
        return None
    found = OpCall(node)
    return found if all(getattr(found, name) == wanted for name, wanted in arguments.items()) else None


def value(node: Node) -> Tensor:
    """Returns the fake tensor of a node's result, which has its shape and dtype."""
    result = node.meta["val"]
    assert isinstance(result, Tensor), f"{node} is not a tensor"
    return result


def other_operand(node: Node, operand: Node) -> Any:
    """Returns the other operand of a binary node."""
    a, b = OpCall(node).self, OpCall(node).other
    return b if a is operand else a


def only_user(node: Node) -> Node | None:
    """Returns the only user of a node; None if it has none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Returns the tensor that a ``get_attr`` node reads; None for any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    attribute: Any = module
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part, None)
    return attribute if isinstance(attribute, Tensor) else None


def is_weight(node: Any) -> bool:
    """True if a node is a weight: a tensor attribute of the module, or a tensor input."""
    return (
        isinstance(node, Node)
        and node.op in ("get_attr", "placeholder")
        and isinstance(node.meta.get("val"), Tensor)
    )


def new_constant(module: fx.GraphModule, before: Node, name: str, tensor: Tensor) -> Node:
    """Adds a tensor to the module, and a ``get_attr`` node for it before the node ``before``.

    A tensor that the module has by that name is not added again.
    """
    attribute, number = name, 0
    while hasattr(module, attribute) and not _is_same(getattr(module, attribute), tensor):
        number += 1
        attribute = f"{name}_{number}"
    if not hasattr(module, attribute):
        module.register_buffer(attribute, tensor)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(attribute)
    node.meta["val"] = fake_mode(before).from_tensor(tensor, static_shapes=True)
    return node


def _is_same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same view of the same memory."""
    forms = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (one, other)]
    return forms[0] == forms[1]


def part_of(
    module: fx.GraphModule, before: Node, weight: Node, part: Sequence[int], make: Callable[[], Tensor]
) -> Node:
    """Adds a part of a constant to a module, once for all nodes that read it, as `new_constant` does.

    Args:
        module: the graph's module.
        before: a node that reads the part.
        weight: the constant.
        part: integers that tell its parts apart.
        make: returns the part, in memory of its own.
    """
    name = "_".join(map(str, (weight.target, "part", *part)))
    held = getattr(module, name, None)
    return new_constant(module, before, name, make() if held is None else held)


def as_float32(module: fx.GraphModule, before: Node, name: str, node: Any) -> Any:
    """Returns a node with the same values in float32: a constant, or a conversion; None for None."""
    if node is None or value(node).dtype == torch.float32:
        return node
    tensor = constant(module, node)
    if tensor is not None:
        return new_constant(module, before, name, tensor.float())
    with module.graph.inserting_before(before):
        return call(module.graph, aten.to.dtype, node, torch.float32)


def _erase_where_unused(node: Node) -> None:
    """Removes a node, and what depends on it, if no result does."""
    dependent, left = {node}, [node]
    while left:
        new = left.pop().users.keys() - dependent
        dependent |= new
        left += new
    for each in reversed(node.graph.nodes):
        if each in dependent and not each.users and not each.is_impure():
            node.graph.erase_node(each)


def writes_to(node: Node, target: Node) -> bool:
    """True if a node changes the result of another one in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable) and OpCall(node).first is target


def is_private(node: Any) -> bool:
    """True if a tensor shares no memory with another one: it is new, or the only view of a new one."""
    while isinstance(node, Node) and len(node.users) == 1 and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or len(schema.returns) != 1:
            return False
        if schema.returns[0].alias_info is None and not is_op(node, aten.reshape, aten.contiguous):
            return True
        node = OpCall(node).first  # of a view
    return False


def is_written(node: Node) -> bool:
    """True if an operator of PyTorch changes a tensor, or a view of it."""
    return any(
        getattr(user.target, "namespace", "") == "aten"
        and (writes_to(user, node) or (_is_view(user, node) and is_written(user)))
        for user in node.users
    )


def _is_view(user: Node, node: Node) -> bool:
    returns = user.target._schema.returns  # type: ignore[union-attr]
    return OpCall(user).first is node and any(result.alias_info is not None for result in returns)


def replace_nodes(graph: fx.Graph, replacement_of: Callable[[Node], Node | None]) -> int:
    """Replaces nodes of a graph, and removes what only they have read; returns the number of nodes.

    Args:
        graph: the graph.
        replacement_of: returns what a node becomes, and inserts it before that node; None leaves the node.
    """
    count = 0
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            replacement = replacement_of(node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            count += 1
    graph.eliminate_dead_code()
    return count


def keep_results(graph: fx.Graph) -> None:
    """Removes all nodes that no result of the graph depends on, also those that write to such nodes.

    `fx.Graph.eliminate_dead_code` keeps every operator that writes in place, with all that it reads.
    """
    pending = [node for node in graph.nodes if node.op == "output"]
    needed: set[Node] = set()
    while pending:
        node = pending.pop()
        needed.add(node)
        writers = {user for user in node.users if writes_to(user, node)}
        pending += {*node.all_input_nodes, *writers} - needed
    for node in reversed(graph.nodes):
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)


def drop_unused(module: fx.GraphModule, *attributes: str) -> None:
    """Removes the given constants and their readers if no result depends on them.

    This frees memory layer by layer; other dead code is removed by a pass over the whole graph.
    """
    graph = module.graph
    for attribute in attributes:
        for node in graph.find_nodes(op="get_attr", target=attribute, sort=False):
            _erase_where_unused(node)
        if not any(n.target == attribute for n in graph.find_nodes(op="get_attr", sort=False)):
            delattr(module, attribute)


def fake_mode(near: Node) -> Any:
    """Returns the fake tensor mode of a graph, searched from a node backwards."""
    node = near
    while True:
        result = node.meta.get("val")
        if isinstance(result, Tensor) and hasattr(result, "fake_mode"):
            return result.fake_mode
        if isinstance(result, (tuple, list)) and result and hasattr(result[0], "fake_mode"):
            return result[0].fake_mode
        node = node.prev
        assert node.op != "root", "no fake tensor in this graph"


def call_op(graph: fx.Graph, target: Any, **arguments: Any) -> Node:
    """Inserts a call of an operator, whose arguments are given by name; see `call`."""
    return call(graph, target, *in_order(target, arguments))


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts a call at the graph's insertion point, with the result of its fake kernel as metadata."""
    node = graph.call_function(target, args, kwargs)

    def fake(n: Node) -> Any:
        return n.meta["val"]

    mode = next((v.fake_mode for v in map(fake, node.all_input_nodes) if hasattr(v, "fake_mode")), None)
    if mode is None:
        mode = fake_mode(node.prev)
    results = _RESULTS.setdefault(graph, {})
    key = _call_key(target, args, kwargs)
    if key in results:
        node.meta["val"] = results[key]
        return node
    with mode, torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, fake), **fx.map_arg(kwargs, fake))
    if key is not None:
        results[key] = node.meta["val"]
    return node


def recompute(node: Node) -> None:
    """Sets a node's metadata to the result of its fake kernel, after its arguments have changed."""

    def fake(n: Node) -> Any:
        return n.meta["val"]

    target: Any = node.target
    with fake_mode(node), torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(node.args, fake), **fx.map_arg(node.kwargs, fake))


_RESULTS: WeakKeyDictionary[fx.Graph, dict[Any, Any]] = WeakKeyDictionary()
"""Results of fake kernels by `_call_key`, for each graph: a model's layers make equal calls."""
_NEW_SYMBOLS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _call_key(target: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Returns what a fake kernel's result depends on; None if it is a new one at each call."""
    if not isinstance(target, torch._ops.OpOverload) or _NEW_SYMBOLS & set(target.tags):
        return None
    return target, _described(args), tuple((name, _described(value)) for name, value in kwargs.items())


def _described(value: Any) -> Any:
    if isinstance(value, Node):
        return _described(value.meta["val"])
    if isinstance(value, Tensor):
        sizes = tuple(map(_described, value.shape)), tuple(map(_described, value.stride()))
        return (*sizes, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return type(value), value


def without_token_factor(heads: Any) -> tuple[Any, Node | None]:
    """Returns heads ``(1, heads, T, size)`` before each token's were multiplied, and the factors or None.

    Factors ``(1, 1, T, 1)`` make attention sharper for later positions, as in Llama 4.
    """
    product = match(heads, aten.mul.Tensor)
    for x, factor in (
        () if product is None else ((product.self, product.other), (product.other, product.self))
    ):
        if isinstance(x, Node) and isinstance(factor, Node) and value(factor).dim() == 4 == value(x).dim():
            one, same_for_heads, tokens, columns = value(factor).shape
            if (one, same_for_heads, columns) == (1, 1, 1) and tokens == value(x).shape[2]:
                return x, factor
    return heads, None


def tokens_first(graph: fx.Graph, node: Any) -> Node:
    """``(1, heads, T, size)`` → ``(T, heads, size)``; undoes an existing transpose instead of adding one."""
    swapped = match(node, aten.transpose.int, dim0=1, dim1=2)
    source = call(graph, aten.transpose.int, node, 1, 2) if swapped is None else swapped.self
    return call(graph, aten.select.int, source, 0, 0)


def unwidened(node: Any) -> Any:
    """Follows conversions to float32 back to their source; returns the node itself if there is none."""
    while (
        is_op(node, *CONVERSIONS)
        and value(node).dtype == torch.float32
        and value(OpCall(node).self).is_floating_point()
        and value(OpCall(node).self).dtype.itemsize <= 4
    ):
        node = OpCall(node).self
    return node


def strip(node: Any, *targets: Any) -> Any:
    """Follows first arguments through the given operators."""
    while is_op(node, *targets):
        node = OpCall(node).first
    return node
