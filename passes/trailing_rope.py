"""Rotations of the last elements of heads become ``rope_`` in place, which copies no first elements.

DeepSeek-V4 rotates queries and keys in this way before attention, and the results of attention by the
opposite angles.  The pass ``rope`` rewrites the rotations before other attentions.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, match, only_user, replace_nodes, value
from torch_armllm.passes.lib.rope_match import RopeTables, joined_parts
from torch_armllm.passes.lib.rope_probe import RotationFinder

armllm = torch.ops.armllm
_VIEWS = (aten.transpose.int, aten.view.default, aten.reshape.default, aten.unsqueeze.default)
_PRODUCERS = (
    armllm.rms_norm.default,
    armllm.layer_norm.default,
    armllm.attention.default,
    armllm.attention_to_entries.default,
)
"""Ops whose result is a tensor of its own."""


def _split(node: Node) -> tuple[Node, Node, Node] | None:
    """Matches ``cat([x[..., :-n], f(x[..., -n:])], -1)``; returns x, its last elements and ``f`` of them."""
    parts = joined_parts(node)
    first = match(parts[0], aten.slice.Tensor) if len(parts) == 2 else None
    if first is None or value(node).dim() != 4:
        return None
    x = first.self
    others = [user for user in x.users if user is not first.node]
    last = match(others[0], aten.slice.Tensor) if len(others) == 1 else None
    if last is None:
        return None
    kept, size = value(first.node).shape[-1], value(x).shape[-1]
    trailing = value(last.node).shape[-1] + kept == size and last.dim in (-1, 3)
    leading = first.dim in (-1, 3) and first.start in (0, None)
    same = value(node).shape == value(x).shape and value(node).dtype == value(x).dtype
    starts = trailing and last.start % size == kept
    alone = only_user(first.node) is node
    return (x, last.node, parts[1]) if starts and leading and same and alone else None


def _is_own(x: Node) -> bool:
    """True if nothing else reads the memory of a tensor."""
    while is_op(x, *_VIEWS):
        x = OpCall(x).self
        if len(x.users) != 1:
            return False
    return is_op(x, *_PRODUCERS)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites such rotations, in place, of tensors that nothing else reads."""
    graph = module.graph
    tables, rotations = RopeTables(module), RotationFinder(module)

    def rotated_in_place(node: Node) -> Node | None:
        split = _split(node)
        if split is None or not _is_own(split[0]):
            return None
        x, last, rotated = split
        by_token = isinstance(value(x).shape[1], torch.SymInt)
        found = rotations.find(rotated, by_token, by_token)
        if found is None or found[0] is not last or found[1].parts > 1:
            return None
        rotation = found[1]
        table = tables.get_probed(rotation, node)
        heads = last if by_token else call(graph, aten.transpose.int, last, 1, 2)
        none = call(graph, aten.slice.Tensor, heads, 2, 0, 0)
        call(graph, armllm.rope_.default, heads, none, *table, rotation.interleaved, rotation.unzip)
        return x

    return replace_nodes(graph, rotated_in_place)
