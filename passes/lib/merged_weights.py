"""Weights of several layers as one tensor.

The modules of a model that was captured before have views of a merged weight.  Another capture of the model
merges the same layers, and then takes this tensor as it is: plans of one model share their weights.  So do
the times that a layer runs in one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.linear import interleave_panels
from torch_armllm.passes.lib.context import PassContext


def merge_panels(parts: Sequence[Tensor]) -> Tensor:
    """Returns the panels of several layers, one layer after another.

    Args:
        parts: packed weights ``(panels, panel_bytes)``.
    """
    counts = [len(part) for part in parts]
    whole = _whole(parts[0], sum(counts))
    if whole is not None and all(map(_is_same, parts, whole.split(counts))):
        return whole
    return torch.cat(list(parts))


def move_weight(module: fx.GraphModule, context: PassContext, weight: Node, part: Tensor) -> None:
    """Lets all who read a weight read it where it is now, a part of a merged one.

    Args:
        module: a graph.
        context: of the passes.
        weight: node of the graph that reads it.
        part: its new place.
    """
    if weight.target in module._buffers:
        module._buffers[str(weight.target)] = part
    context.on_new_weight(str(weight.target), part)


def merge_pairs(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the panels of two layers by turns, as `interleave_panels` does.

    Args:
        gate: packed weight ``(panels, panel_bytes)``.
        up: the other one.
    """
    whole = _whole(gate, 2 * len(gate))
    if whole is not None and all(map(_is_same, (gate, up), (whole[::2], whole[1::2]))):
        return whole
    return interleave_panels(gate, up)


def _whole(part: Tensor, panels: int) -> Tensor | None:
    """Returns the tensor of so many panels that a part is a view of; None if there is none."""
    width = part.shape[-1]
    if part.untyped_storage().nbytes() != panels * width * part.element_size():
        return None
    return part.as_strided((panels, width), (width, 1), 0)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same view of the same memory."""
    same = one.shape == other.shape and one.stride() == other.stride()
    return same and one.data_ptr() == other.data_ptr()
