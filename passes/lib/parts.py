"""Parts of tensors: some elements of one dimension, and their place in tensors of other shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten, call, value

Ranges = tuple[tuple[int, int], ...]
"""Begin and end of each range."""


@dataclass(frozen=True)
class Part:
    """Elements of one dimension of a tensor.

    Attributes:
        axis: the dimension, counted from the last.
        period: the dimension is a number of groups of so many elements; mostly one group.
        ranges: elements of each group, in the order of the result.
    """

    axis: int
    period: int
    ranges: Ranges

    @classmethod
    def of(cls, axis: int, period: int, *chosen: range) -> Part:
        """Returns a part of ranges of elements."""
        return cls(axis, period, tuple((each.start, each.stop) for each in chosen))

    @property
    def count(self) -> int:
        """Number of elements in each group."""
        return sum(end - begin for begin, end in self.ranges)

    def on(self, axis: int) -> Part:
        """Returns the same elements of another dimension."""
        return Part(axis, self.period, self.ranges)


def union(parts: Iterable[Part], align: int = 1) -> Part:
    """Returns all elements of parts of one dimension, in ascending order, in whole groups of ``align``."""
    parts = list(parts)
    axis, period = parts[0].axis, parts[0].period
    bounds = sorted(
        (begin // align * align, min(-(-end // align) * align, period))
        for part in parts
        for begin, end in part.ranges
    )
    merged = [bounds[0]]
    for begin, end in bounds[1:]:
        if begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return Part(axis, period, tuple(merged))


def within(part: Part, whole: Part) -> Part:
    """Returns where the elements of a part are among those of a `union` that contains it."""
    ranges: list[tuple[int, int]] = []
    for begin, end in part.ranges:
        at = 0
        for first, last in whole.ranges:
            if first <= begin and end <= last:
                begin, end = at + begin - first, at + end - first
                break
            at += last - first
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((begin, end))
    return Part(part.axis, whole.count, tuple(ranges))


def through_view(part: Part, before: Sequence[Any], after: Sequence[Any]) -> Part | None:
    """Returns a part of a tensor where it is seen in another shape; None if it is not a part there."""
    inner = row_size(before, part.axis)
    if inner is None:
        return None
    step = math.gcd(part.period, *(bound for each in part.ranges for bound in each))
    unit, count = inner * step, part.period // step
    for axis in range(len(after)):
        size = row_size(after, axis)
        if size is None:
            return None
        scale = unit // size
        if unit % size == 0 and _is_multiple(after[-1 - axis], count * scale):
            ranges = tuple((begin // step * scale, end // step * scale) for begin, end in part.ranges)
            return Part(axis, count * scale, ranges)
    return None


def row_size(shape: Sequence[Any], axis: int) -> int | None:
    """Returns the product of the dimensions behind one, which is counted from the last; None if unknown."""
    sizes = shape[len(shape) - axis :]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def sliced(tensor: Tensor, part: Part) -> Tensor:
    """Returns a part of a tensor, in memory of its own."""
    dim = tensor.dim() - 1 - part.axis
    return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in part.ranges], dim)


def slice_node(graph: fx.Graph, node: Node, part: Part) -> Node:
    """Inserts the call that takes a part of a result, whose period is a whole dimension."""
    dim = value(node).dim() - 1 - part.axis
    slices = [call(graph, aten.slice.Tensor, node, dim, begin, end) for begin, end in part.ranges]
    return slices[0] if len(slices) == 1 else call(graph, aten.cat.default, slices, dim)


def fills(part: Part, node: Node) -> bool:
    """True if a part's period is a dimension of a node's result."""
    shape = value(node).shape
    return len(shape) > part.axis and shape[-1 - part.axis] == part.period


def _is_multiple(size: Any, period: int) -> bool:
    if isinstance(size, int):
        return size % period == 0
    return bool(size.node.expr % period == 0)
