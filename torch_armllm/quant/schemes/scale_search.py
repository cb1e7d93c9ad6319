"""The search for the scales of groups with the least squared error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops.rounding import search_steps

Candidate = tuple[Tensor, "int | Tensor"]
"""Steps (r, G), and zero points of the same shape, or one for all groups."""


@dataclass(frozen=True)
class Levels:
    """The values of a group: ``step · q``, where q and its zero point add up to ``lowest`` … ``highest``."""

    lowest: int
    highest: int

    def round(self, value: Tensor, step: Tensor, zero: int | Tensor, out: Tensor) -> None:
        """Writes the nearest q of values (r, G, n), with steps and zero points (r, G)."""
        self.clamp(torch.mul(value, 1 / step[..., None], out=out).round_(), zero)

    def clamp(self, q: Tensor, zero: int | Tensor) -> None:
        """Clamps q (r, G, n), in place."""
        if isinstance(zero, Tensor):  # bounds that are tensors take longer
            q.add_(zero[..., None]).clamp_(self.lowest, self.highest).sub_(zero[..., None])
        else:
            q.clamp_(self.lowest - zero, self.highest - zero)

    def restore(self, q: Tensor, step: Tensor, zero: int | Tensor) -> None:
        """Turns q (r, G, n) into values, in place."""
        q.mul_(step[..., None])

    def choose(
        self, value: Tensor, candidates: Iterable[Candidate], root: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the best steps and zero points (r, G); ``root`` (G, n) multiplies errors, unless None."""
        pairs = list(candidates)
        steps = torch.stack([step for step, _ in pairs])
        zeros = torch.stack([torch.as_tensor(zero, dtype=step.dtype).expand_as(step) for step, zero in pairs])
        found = search_steps(value, steps, zeros, root, self.lowest, self.highest).long()
        index = found.clamp(min=0)[None]
        best, best_zero = steps.gather(0, index)[0], zeros.gather(0, index)[0]
        return best.masked_fill_(found < 0, 1), best_zero.masked_fill_(found < 0, 0)


class OtherLevels(Levels):
    """Levels whose second number has another meaning, or that round in another way."""

    def choose(  # noqa: D102
        self, value: Tensor, candidates: Iterable[Candidate], root: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, groups, _ = value.shape
        best = torch.ones(rows, groups)
        best_zero = torch.zeros(rows, groups)
        least = torch.full((rows, groups), math.inf)
        buffer = torch.empty_like(value)
        for step, zero in candidates:
            self.round(value, step, zero, buffer)
            self.restore(buffer, step, zero)
            buffer.sub_(value)
            if root is not None:
                buffer.mul_(root)
            error = torch.linalg.vector_norm(buffer, dim=-1)
            better = error < least
            least = torch.where(better, error, least)
            best = torch.where(better, step, best)
            best_zero = torch.where(better, zero, best_zero)
        return best, best_zero


def best_steps(
    value: Tensor,
    candidates: Iterable[Candidate],
    importance: Tensor | None,
    levels: Levels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks for each group the step and the zero point with the least squared error.

    Args:
        value: the weights (r, G, n).
        candidates: steps (r, G), each with a zero point: one for all groups, or (r, G).
        importance: weights of the squared errors (G, n), or None.
        levels: the values that a step and a zero point allow.

    Returns:
        The steps (r, G), the zero points (r, G) and the rounded values less their zero points (r, G, n), as
        floats.
    """
    root = None if importance is None else importance.sqrt()
    best, best_zero = levels.choose(value, candidates, root)
    q = torch.empty_like(value)
    levels.round(value, best, best_zero, q)
    return best, best_zero, q


def inverse(scale: Tensor) -> Tensor:
    """Returns 1 / scale, and 0 for the scale of a row of zeros."""
    return torch.where(scale.abs() > 1e-30, 1 / scale, torch.zeros_like(scale))


def regroup(weight: Tensor, importance: Tensor | None, span: int) -> tuple[Tensor, Tensor | None]:
    """Reshapes rows (r, G, 32) and importance (G, 32) to (r, S, span) and (S, span), padded with zeros."""
    flat = weight.flatten(1)
    columns = flat.shape[1]
    span = span or columns
    short = -columns % span
    value = torch.nn.functional.pad(flat, (0, short)).view(flat.shape[0], -1, span)
    if importance is None:
        return value, None
    return value, torch.nn.functional.pad(importance.flatten(), (0, short)).view(-1, span)
