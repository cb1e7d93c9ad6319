"""Parameters of attention that a model computes by itself: found by running that part of its graph.

A softmax over tokens can have any mask and any bias.  Chosen queries, keys and values show them: equal scores
show what is visible and the bias, single values of one show the weights, and random keys show the scale.
Attention with these parameters must then give the same results for random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_armllm.capture.markers.attention import EVERY, UnsupportedAttention, dense_attention

_LENGTH = 9
"""Tokens of a probe; a window is looked for with more."""
_FARTHEST, _ALIKE = 300, 32
"""Tokens of a probe of a bias to both sides, and the farthest distances that must have the same bias."""
_MOST_SCORES = 1 << 27
_TOLERANCE = 1e-4


class Attend(Protocol):
    """The part of a graph from queries, keys and values to attention's result."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> tuple[Tensor, list[Any]]:
        """Computes ``(1, heads, T, value_size)`` from ``(1, heads, T, …)``, and all values on the way."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of heads and of elements of a query and a value."""

    heads: int
    head_size: int
    value_size: int

    def random(self, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random queries, keys and values."""
        random = torch.Generator().manual_seed(seed)
        sizes = (self.head_size, self.head_size, self.value_size)
        q, k, v = (torch.randn(1, self.heads, length, size, generator=random) for size in sizes)
        return q, k, v

    def equal(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of zero."""
        q, k, v = (torch.zeros_like(x) for x in self.random(length, 0))
        return q, k, v


@dataclass(frozen=True)
class Parameters:
    """Parameters of attention; see `dense_attention`."""

    scale: float
    window: int = 0
    alibi_slopes: Tensor | None = None
    ahead: int = 0
    biases: Tensor | None = None


def find_parameters(attend: Attend, sizes: Sizes, numbers: set[int], factors: set[float]) -> Parameters:
    """Returns the parameters with which attention computes what a part of a graph computes.

    Args:
        attend: the part of the graph.
        sizes: sizes of its inputs.
        numbers: integers in the graph's arithmetic, among which the window is if there is one.
        factors: factors or divisors of the scores, among which the scale is if it is none of the usual ones.

    Raises:
        UnsupportedAttention: it computes something else; the message says what, without a subject.
    """
    bias, seen, values = _bias(attend, sizes, _LENGTH)
    ahead = EVERY if bool(seen[0, -1]) else 0
    slopes = None if ahead else _slopes(bias, seen, values)
    biases = _biases(attend, sizes) if ahead and float(bias.abs().max()) > _TOLERANCE else None
    longest = max([_LENGTH, *(n + 2 for n in numbers)])
    if sizes.heads * longest * longest > _MOST_SCORES:
        raise UnsupportedAttention(f"has a mask of its own that may hide tokens after {longest - 2} others")
    window = _window(attend, sizes, longest)
    scale = _scale(attend, sizes, bias, seen, factors)
    found = Parameters(scale, window, slopes, ahead, biases)
    for length in {_LENGTH, longest}:
        _verify(attend, sizes, found, length)
    return found


def _weights(attend: Attend, q: Tensor, k: Tensor, sizes: Sizes) -> tuple[Tensor, list[Any]]:
    """Returns the softmax weights ``(heads, T, T)``: results for values that are rows of a unit matrix."""
    length = q.shape[2]
    columns = []
    for first in range(0, length, sizes.value_size):
        v = torch.zeros(1, sizes.heads, length, sizes.value_size)
        count = min(sizes.value_size, length - first)
        v[:, :, first : first + count, :count] = torch.eye(count)
        out, values = attend(q, k, v)
        columns.append(out[0, ..., :count])
    return torch.cat(columns, -1), values


def _bias(attend: Attend, sizes: Sizes, length: int) -> tuple[Tensor, Tensor, list[Any]]:
    """Returns what is added to the scores ``(heads, T, T)``, relative to each token's own, and what is seen.

    The latter is boolean ``(T, T)``.
    """
    q, k, _ = sizes.equal(length)
    weights, values = _weights(attend, q, k, sizes)
    later = torch.ones(length, length).triu(1).bool()
    count = int((weights[0, -1] > 0).sum())
    seen = torch.ones(length, length).tril().triu(1 - count).bool()
    if bool((weights[:, later] != 0).any()):
        seen[:] = True
        if not bool((weights > 0).all()):
            raise UnsupportedAttention("attends to some of the later tokens only")
    if not bool(((weights > 0) == seen).all()):
        raise UnsupportedAttention("hides some of the tokens before")
    logits = weights.log()
    return logits - logits.diagonal(dim1=1, dim2=2)[..., None], seen, values


def _slopes(bias: Tensor, seen: Tensor, values: list[Any]) -> Tensor | None:
    """Returns the slope of each head's bias, ``(heads,)``; None without a bias."""
    count = int(seen[-1].sum())
    measured = -bias[:, -1, -count] / max(count - 1, 1)
    if float(measured.abs().max()) < _TOLERANCE:
        measured = torch.zeros_like(measured)
    positions = torch.arange(_LENGTH)
    linear = measured[:, None, None] * (positions[None] - positions[:, None])
    if not torch.allclose(bias[:, seen], linear[:, seen], rtol=1e-3, atol=1e-3):
        raise UnsupportedAttention("adds a bias to its scores that is not linear in the distance of tokens")
    if not bool(measured.any()):
        return None
    for value in values:  # the graph's own slopes have no rounding of the softmax
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == len(measured):
            for exact in (value.flatten(), -value.flatten()):
                if torch.allclose(exact.float(), measured, rtol=1e-3, atol=1e-5):
                    return exact.float().contiguous()
    return measured


def _biases(attend: Attend, sizes: Sizes) -> Tensor:
    """Returns the bias of each head and distance, ``(heads, 2 · reach + 1)``; it is constant beyond."""
    bias, _, _ = _bias(attend, sizes, _FARTHEST)
    last = _FARTHEST - 1
    distance = torch.arange(_FARTHEST) - torch.arange(_FARTHEST)[:, None] + last
    table = torch.cat([bias[:, -1, :-1], bias[:, 0]], 1)  # from −last to last
    if not torch.allclose(bias, table[:, distance], rtol=1e-4, atol=1e-4):
        raise UnsupportedAttention("adds a bias to its scores that is no function of the distance of tokens")
    before, after = table[:, :last].flip(1), table[:, last + 1 :]
    differs = ((before - before[:, -1:]).abs() + (after - after[:, -1:]).abs()).amax(0) > _TOLERANCE
    reach = int(differs.nonzero().max()) + 2 if bool(differs.any()) else 1
    if reach > last - _ALIKE:
        raise UnsupportedAttention(f"adds a bias to its scores that differs beyond {reach} tokens")
    return table[:, last - reach : last + reach + 1].contiguous()


def _window(attend: Attend, sizes: Sizes, length: int) -> int:
    """Returns the number of tokens that see the first one; 0 if all do."""
    q, k, v = sizes.equal(length)
    v[:, :, 0] = 1.0
    out, _ = attend(q, k, v)
    sees = (out[0] > 0).any(-1).any(0)
    count = int(sees.sum())
    if not bool(sees[:count].all()):
        raise UnsupportedAttention("hides some of the tokens before")
    return count if count < length else 0


def _scale(attend: Attend, sizes: Sizes, bias: Tensor, seen: Tensor, factors: set[float]) -> float:
    """Returns the factor of the products of queries and keys."""
    q, k, _ = sizes.random(_LENGTH, 1)
    q = q / q.norm(dim=-1, keepdim=True)
    k = k / k.norm(dim=-1, keepdim=True)
    logits = _weights(attend, q, k, sizes)[0].log()
    scores = logits - logits.diagonal(dim1=1, dim2=2)[..., None] - bias
    products = (q @ k.transpose(2, 3))[0]
    products = products - products.diagonal(dim1=1, dim2=2)[..., None]
    scores, products = scores[:, seen].double(), products[:, seen].double()
    measured = float((scores * products).sum() / (products * products).sum().clamp(min=1e-30))
    usual = {1.0, sizes.head_size**-0.5, *factors, *(1 / f for f in factors if f)}
    nearest = min(usual, key=lambda factor: abs(factor - measured))
    return nearest if math.isclose(nearest, measured, rel_tol=1e-3) else measured


def _verify(attend: Attend, sizes: Sizes, found: Parameters, length: int) -> None:
    """Compares results for random numbers, twice: token ids and first positions differ."""
    for seed in (2, 3):
        q, k, v = sizes.random(length, seed)
        expected, _ = attend(q, k, v, seed)
        out = dense_attention(q, k, v, 0, **vars(found))
        if not torch.allclose(out.transpose(1, 2), expected, rtol=1e-3, atol=1e-3):
            raise UnsupportedAttention("computes something else than attention with its scores")
