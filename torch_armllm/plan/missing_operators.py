"""The sentence that says which layers of a graph have operators without an instruction."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx.node import Node

_MOST_NAMES = 4
"""Operators of a layer that the sentence names."""
_VERBS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset(("topk", "sort", "argsort", "scatter", "gather", "histc", "bincount", "index_add")),
        "chooses or groups rows by their values",
    ),
    (frozenset(("scaled_dot_product_attention",)), "attends to something else than tokens in the cache"),
    (frozenset(("linalg_vector_norm", "var", "var_mean")), "normalizes in a way of its own"),
    (frozenset(("cos", "sin")), "computes sines and cosines in a way of its own"),
)
"""Operators, and what a layer does that has one of them; the first entry that fits counts."""


def layer_of(node: Node) -> str:
    """Returns the module that computes a node, as a path and its class; empty if the node does not say."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    if not modules:
        return ""
    path, kind = modules[-1]
    name = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    path = path.partition(".")[2]
    return f"{path} ({name})" if path else name


def describe_missing(nodes: Iterable[Node], known: Container[object]) -> str:
    """Returns a sentence with each kind of layer that has operators without an instruction.

    Layers of one class are one kind, named by the first of them.  The kinds with the most operators come
    first: what is missing there is more than a single instruction.

    Args:
        nodes: calls of operators, in the graph's order; one of them at least has no instruction.
        known: the operators with an instruction.
    """
    layer = "the model"
    first: dict[str, str] = {}
    missing: dict[str, dict[str, None]] = {}
    for node in nodes:
        layer = layer_of(node) or layer
        if node.target not in known:
            kind = layer.rpartition(" ")[2]
            first.setdefault(kind, layer)
            name = getattr(node.target, "_opname", None) or str(node.target)
            missing.setdefault(kind, {})[str(name)] = None
    kinds = sorted(missing, key=lambda kind: -len(missing[kind]))
    parts = [f"{first[kind]} {_what(list(missing[kind]))}" for kind in kinds]
    return "; ".join(parts) + ": plans have no instruction for these operators"


def _what(operators: list[str]) -> str:
    """Returns what a layer does by some operators, with their names."""
    verb = next((verb for some, verb in _VERBS if not some.isdisjoint(operators)), "")
    names = ", ".join(operators[:_MOST_NAMES])
    if len(operators) > _MOST_NAMES:
        names += f" and {len(operators) - _MOST_NAMES} more"
    return f"{verb} ({names})" if verb else f"computes {names}"
