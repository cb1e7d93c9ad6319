"""Search of a module's code for reads of its layers' weights: a quantized layer has no such weight."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

from torch import nn


class _Reads(ast.NodeVisitor):
    """Collects ``x.y`` of ``self.x.y.weight`` and ``….bias``, except in code that runs only in training."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        for statement in node.orelse if _needs_training(node.test) else (*node.body, *node.orelse):
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = _path_of(node.value)
        if node.attr in ("weight", "bias") and path:
            self.names.add(path)
        self.generic_visit(node)


def _path_of(node: ast.expr) -> str:
    """Returns ``x.y`` of ``self.x.y``; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if _is_self(node) else ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _needs_training(test: ast.expr) -> bool:
    """True if a condition is ``self.training``, or ``self.training and …``."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_needs_training(value) for value in test.values)
    return isinstance(test, ast.Attribute) and test.attr == "training" and _is_self(test.value)


@cache
def layers_read(kind: type[nn.Module]) -> frozenset[str]:
    """Returns the paths of layers within a class whose weight or bias it reads without calling them.

    Patched models are in evaluation mode, so branches for training do not count: Mamba's fused kernel for
    training takes the weights of its projections.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    reads = _Reads()
    reads.visit(tree)
    return frozenset(reads.names)
