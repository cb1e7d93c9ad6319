"""Sinkhorn normalization of each token's small matrix, as in hyper-connections, becomes ``sinkhorn``.

Columns are divided by their sums, then rows and columns in turn.  Operator by operator these would be two
instructions for each division.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, match, value

MOST_ROWS = 8
"""Rows and columns of a matrix, as in ``ops/pointwise/pointwise.h``."""

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("sinkhorn(Tensor x, int rounds, float eps) -> Tensor")


def sinkhorn(x: Tensor, rounds: int, eps: float) -> Tensor:
    """Divides columns by their sums, and ``rounds`` times rows and columns.

    Args:
        x: float32 ``(..., n, n)``.
        rounds: further divisions of rows and then columns.
        eps: added to each sum.
    """
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(rounds):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


_library.impl("sinkhorn", sinkhorn, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::sinkhorn", lambda x, rounds, eps: torch.empty_like(x), lib=_library)


@dataclass
class _Division:
    """A division by the sums over a dimension, ``x / (x.sum(dim) + eps)``."""

    x: Node
    dim: int
    eps: float


def _division(node: Any) -> _Division | None:
    if not is_op(node, aten.div.Tensor):
        return None
    x, divisor = OpCall(node).self, match(OpCall(node).other, aten.add.Tensor)
    total = None if divisor is None else match(divisor.self, aten.sum.dim_IntList, keepdim=True)
    if divisor is None or total is None or not isinstance(divisor.other, float) or total.self is not x:
        return None
    if len(total.dim) != 1 or len(total.node.users) != 1 or len(divisor.node.users) != 1:
        return None
    return _Division(x, int(total.dim[0]) % value(x).dim() - value(x).dim(), divisor.other)


def _following(node: Node) -> Node | None:
    """Returns the division of a division's result, if nothing else reads it."""
    found = [user for user in node.users if is_op(user, aten.div.Tensor)]
    return found[0] if len(found) == 1 and len(node.users) == 2 else None


def _is_small_matrix(val: Tensor) -> bool:
    rows, columns = val.shape[-2:]
    sizes = isinstance(rows, int) and rows == columns and rows <= MOST_ROWS
    return sizes and val.dtype == torch.float32


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all chains of such divisions."""
    num_rewritten = 0
    for node in list(module.graph.nodes):
        first = _division(node)
        if first is None or first.dim != -2 or not _is_small_matrix(value(node)) or not node.users:
            continue
        last, rounds = node, 0
        while True:
            by_row = _following(last)
            by_column = None if by_row is None else _following(by_row)
            found = [_division(x) for x in (by_row, by_column)]
            if [None if d is None else (d.dim, d.eps) for d in found] != [(-1, first.eps), (-2, first.eps)]:
                break
            assert by_column is not None
            last, rounds = by_column, rounds + 1
        if rounds == 0:
            continue
        with module.graph.inserting_before(last):
            op = torch.ops.armllm.sinkhorn.default
            last.replace_all_uses_with(call(module.graph, op, first.x, rounds, first.eps))
        module.graph.eliminate_dead_code()
        num_rewritten += 1
    return num_rewritten
