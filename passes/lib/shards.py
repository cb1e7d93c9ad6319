"""Shards of tensors: some elements of one dimension, and their place in tensors of other shapes."""

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
class Shard:
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
    def of(cls, axis: int, period: int, *chosen: range) -> Shard:
        """Returns a shard of ranges of elements."""
        return cls(axis, period, tuple((each.start, each.stop) for each in chosen))

    @property
    def count(self) -> int:
        """Number of elements in each group."""
        return sum(end - begin for begin, end in self.ranges)

    def on(self, axis: int) -> Shard:
        """Returns the same elements of another dimension."""
        return Shard(axis, self.period, self.ranges)


def union(shards: Iterable[Shard], align: int = 1) -> Shard:
    """Returns all elements of shards of one dimension, in ascending order, in whole groups of ``align``."""
    shards = list(shards)
    axis, period = shards[0].axis, shards[0].period
    bounds = sorted(
        (begin // align * align, min(-(-end // align) * align, period))
        for shard in shards
        for begin, end in shard.ranges
    )
    merged = [bounds[0]]
    for begin, end in bounds[1:]:
        if begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return Shard(axis, period, tuple(merged))


def within(shard: Shard, whole: Shard) -> Shard:
    """Returns where the elements of a shard are among those of a `union` that contains it."""
    ranges: list[tuple[int, int]] = []
    for begin, end in shard.ranges:
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
    return Shard(shard.axis, whole.count, tuple(ranges))


def through_view(shard: Shard, before: Sequence[Any], after: Sequence[Any]) -> Shard | None:
    """Returns a shard of a tensor where it is seen in another shape; None if it is not a shard there."""
    inner = row_size(before, shard.axis)
    if inner is None:
        return None
    step = math.gcd(shard.period, *(bound for each in shard.ranges for bound in each))
    unit, count = inner * step, shard.period // step
    for axis in range(len(after)):
        size = row_size(after, axis)
        if size is None:
            return None
        scale = unit // size
        if unit % size == 0 and _is_multiple(after[-1 - axis], count * scale):
            ranges = tuple((begin // step * scale, end // step * scale) for begin, end in shard.ranges)
            return Shard(axis, count * scale, ranges)
    return None


def row_size(shape: Sequence[Any], axis: int) -> int | None:
    """Returns the product of the dimensions behind one, which is counted from the last; None if unknown."""
    sizes = shape[len(shape) - axis :]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def sliced(tensor: Tensor, shard: Shard) -> Tensor:
    """Returns a shard of a tensor, in memory of its own."""
    dim = tensor.dim() - 1 - shard.axis
    return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in shard.ranges], dim)


def slice_node(graph: fx.Graph, node: Node, shard: Shard) -> Node:
    """Inserts the call that takes a shard of a result, whose period is a whole dimension."""
    dim = value(node).dim() - 1 - shard.axis
    slices = [call(graph, aten.slice.Tensor, node, dim, begin, end) for begin, end in shard.ranges]
    return slices[0] if len(slices) == 1 else call(graph, aten.cat.default, slices, dim)


def fills(shard: Shard, node: Node) -> bool:
    """True if a shard's period is a dimension of a node's result."""
    shape = value(node).shape
    return len(shape) > shard.axis and shape[-1 - shard.axis] == shard.period


def _is_multiple(size: Any, period: int) -> bool:
    if isinstance(size, int):
        return size % period == 0
    return bool(size.node.expr % period == 0)
