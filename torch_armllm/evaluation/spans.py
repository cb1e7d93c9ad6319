"""Spans of tokens to score: a context and the continuation whose log-likelihood is requested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.evaluation.prefix_tree import Node

LogLikelihood = tuple[float, bool]
"""A log-likelihood, and whether every token of the continuation is the greedy one."""


class Span(NamedTuple):
    """A context and its continuation."""

    ids: list[int]
    """the input of the model: all tokens but the last"""
    targets: list[int]
    """the continuation, whose last token is not an input"""

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], max_length: int) -> Span:
        """Returns a span cut on the left to ``max_length`` input tokens."""
        ids = [*context, *continuation][-(max_length + 1) :][:-1]
        return cls(ids, list(continuation))

    @property
    def first(self) -> int:
        """The position whose logits predict the continuation's first token."""
        return len(self.ids) - len(self.targets)


class SpanScores:
    """Log-probabilities of the targets of all spans, filled in as logits are computed.

    Args:
        spans: spans with continuations that are not empty.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._scores = [torch.empty(len(span.targets)) for span in spans]
        self._greedy = [torch.empty(len(span.targets), dtype=torch.int64) for span in spans]

    def first_needed(self, node: Node) -> int:
        """Returns the first position of a node whose logits a span needs; the node's end if none does."""
        return min([node.end, *(max(self._spans[n].first, node.start) for n in node.sequences)])

    def add_logits(self, node: Node, start: int, logits: Tensor) -> None:
        """Adds logits ``(R, vocab_size)`` of a node's positions from ``start`` on."""
        scores = log_probabilities(logits)
        best = scores.argmax(-1)
        for number in node.sequences:
            span = self._spans[number]
            begin, end = max(start, span.first), min(start + len(logits), len(span.ids))
            if begin < end:
                rows, targets_range = (
                    slice(begin - start, end - start),
                    slice(begin - span.first, end - span.first),
                )
                targets = torch.tensor(span.targets[targets_range])
                self._scores[number][targets_range] = scores[rows].gather(1, targets[:, None])[:, 0]
                self._greedy[number][targets_range] = best[rows]

    def results(self) -> list[LogLikelihood]:
        """Returns the log-likelihoods of all spans, in order."""
        return [
            (float(scores.sum()), greedy.tolist() == span.targets)
            for span, scores, greedy in zip(self._spans, self._scores, self._greedy, strict=True)
        ]


def log_probabilities(logits: Tensor) -> Tensor:
    """Returns log-probabilities as float32."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def pieces(start: int, end: int, most: int) -> Iterable[tuple[int, int]]:
    """Yields a range in pieces of at most ``most``."""
    for begin in range(start, end, most):
        yield begin, min(begin + most, end)
