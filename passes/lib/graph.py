"""Small tools that the passes share: look at nodes, build new ones, read and replace constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

aten = torch.ops.aten
CONVERSIONS = (aten.to, aten.type_as, aten._to_copy)


def is_op(node: Any, *targets: Any) -> bool:
    """Whether ``node`` is a call of one of these operators (overloads or packets)."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return node.target in targets or (packet is not None and packet in targets)


def value(node: Node) -> Tensor:
    """The fake tensor that stands for a node's result: shape and dtype."""
    found = node.meta["val"]
    assert isinstance(found, Tensor), f"{node} is not a tensor"
    return found


def other_operand(node: Node, operand: Node) -> Any:
    """The other argument of a binary node."""
    a, b = node.args[:2]
    return b if a is operand else a


def only_user(node: Node) -> Node | None:
    """The one user of a node, or None if it has none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor behind a ``get_attr`` node, or None."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else None


def is_weight(node: Any) -> bool:
    """Whether a node is a weight: an attribute of the module, or an input where weights are inputs."""
    return (
        isinstance(node, Node)
        and node.op in ("get_attr", "placeholder")
        and isinstance(node.meta.get("val"), Tensor)
    )


def new_constant(module: fx.GraphModule, before: Node, name: str, tensor: Tensor) -> Node:
    """Adds a tensor to the module and a ``get_attr`` node for it in front of ``before``."""
    attribute, number = name, 0
    while hasattr(module, attribute):
        number += 1
        attribute = f"{name}_{number}"
    module.register_buffer(attribute, tensor)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(attribute)
    node.meta["val"] = fake_mode(before).from_tensor(tensor, static_shapes=True)
    return node


def _erase_where_unused(node: Node) -> None:
    for user in list(node.users):
        _erase_where_unused(user)
    if not node.users and not node.is_impure():
        node.graph.erase_node(node)


def drop_unused(module: fx.GraphModule, *attributes: str) -> None:
    """Removes those of the given constants whose readers serve nothing any more, with these.

    Memory is freed so one layer after the other; what else is dead is left to a pass over the whole graph.
    """
    graph = module.graph
    for attribute in attributes:
        for node in graph.find_nodes(op="get_attr", target=attribute, sort=False):
            _erase_where_unused(node)
        if not any(n.target == attribute for n in graph.find_nodes(op="get_attr", sort=False)):
            delattr(module, attribute)


def fake_mode(near: Node) -> Any:
    """The fake tensor mode of a graph, found at or before a node."""
    node = near
    while True:
        found = node.meta.get("val")
        if isinstance(found, Tensor) and hasattr(found, "fake_mode"):
            return found.fake_mode
        if isinstance(found, (tuple, list)) and found and hasattr(found[0], "fake_mode"):
            return found[0].fake_mode
        node = node.prev
        assert node.op != "root", "no fake tensor in this graph"


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts a call at the graph's insertion point and works out what it gives, by its fake kernel."""
    node = graph.call_function(target, args, kwargs)

    def fake(n: Node) -> Any:
        return n.meta["val"]

    mode = next((v.fake_mode for v in map(fake, node.all_input_nodes) if hasattr(v, "fake_mode")), None)
    if mode is None:
        mode = fake_mode(node.prev)
    with mode, torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, fake), **fx.map_arg(kwargs, fake))
    return node


def unwidened(node: Any) -> Any:
    """What a node is a float32 copy of; the node itself where it is none."""
    while (
        is_op(node, *CONVERSIONS)
        and value(node).dtype == torch.float32
        and value(node.args[0]).is_floating_point()
        and value(node.args[0]).dtype.itemsize <= 4
    ):
        node = node.args[0]
    return node


def strip(node: Any, *targets: Any) -> Any:
    """Follows first arguments through the given operators."""
    while is_op(node, *targets):
        node = node.args[0]
    return node
