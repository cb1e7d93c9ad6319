"""Rotations by cosines and sines that a model reads from a table of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops.rope import reference_rope

_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class TabledRotation:
    """Parameters of a rotation of heads by a table.

    Attributes:
        cos, sin: of each position and pair, float32 ``(positions, pairs)``.
        interleaved, unzip: as in `torch_armllm.ops.rope.rope_`.
        parts: heads are rotated as a whole.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    unzip: bool = False
    parts: int = 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TabledRotation)
            and (self.interleaved, self.unzip) == (other.interleaved, other.unzip)
            and torch.equal(self.cos, other.cos)
            and torch.equal(self.sin, other.sin)
        )

    def __hash__(self) -> int:
        return hash((self.cos.shape, self.interleaved, self.unzip))


def read_table(
    rotate: Callable[[Tensor, Tensor], Tensor], x: Tensor, sampled: Tensor, count: int
) -> TabledRotation | None:
    """Returns the table with which a function rotates heads; None if it does something else.

    Args:
        rotate: returns rotated heads ``(1, T, heads, size)`` of heads and their positions ``(T,)``.
        x: random heads ``(1, T, heads, size)``.
        sampled: positions of ``x``, less than ``count``.
        count: number of positions in the table.
    """
    rotated = rotate(x, sampled)
    changed = ((rotated - x).abs() > _TOLERANCE).flatten(0, 2).any(0).nonzero()
    rotary = int(changed.max()) + 1 if changed.numel() else 0
    if rotary == 0 or rotary % 2:
        return None
    positions = torch.arange(count)
    for interleaved in (False, True):
        firsts = torch.arange(0, rotary, 2) if interleaved else torch.arange(rotary // 2)
        seconds = firsts + (1 if interleaved else rotary // 2)
        units = x.new_zeros(1, count, *x.shape[2:])
        units[..., firsts] = 1.0  # the first of each pair becomes its cosine, the second its sine
        turned = rotate(units, positions)[0, :, 0]
        found = TabledRotation(turned[:, firsts].contiguous(), turned[:, seconds].contiguous(), interleaved)
        expected = reference_rope(x, found.cos[sampled], found.sin[sampled], interleaved)
        if torch.allclose(expected, rotated, rtol=_TOLERANCE, atol=_TOLERANCE):
            return found
    return None
