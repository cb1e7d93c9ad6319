"""What a harness asks for: log-likelihoods of the ends of texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.evaluation.prefix_tree import Node

Answer = tuple[float, bool]
"""A log-likelihood, and whether every token of the continuation is the likeliest one."""


class Text(NamedTuple):
    """A context and what follows it."""

    ids: list[int]
    """what the model reads: all but the last token"""
    targets: list[int]
    """the continuation, whose last token is not read"""

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], longest: int) -> Text:
        """The text's last ``longest`` tokens, and the one behind them."""
        ids = [*context, *continuation][-(longest + 1) :][:-1]
        return cls(ids, list(continuation))

    @property
    def first(self) -> int:
        """The position that the continuation's first token is drawn behind."""
        return len(self.ids) - len(self.targets)


class Scores:
    """Log-probabilities of all texts' targets, filled in as logits come.

    Args:
        texts: with continuations that are not empty.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self._found = [torch.empty(len(text.targets)) for text in texts]
        self._likeliest = [torch.empty(len(text.targets), dtype=torch.int64) for text in texts]

    def wanted(self, node: Node) -> int:
        """The first position of a node whose logits some text asks for; its end where none does."""
        return min([node.end, *(max(self._texts[n].first, node.start) for n in node.texts)])

    def take(self, node: Node, start: int, logits: Tensor) -> None:
        """Notes what logits ``(R, vocabulary)`` of positions from ``start`` on say of the node's texts."""
        scores = log_probabilities(logits)
        best = scores.argmax(-1)
        for number in node.texts:
            text = self._texts[number]
            begin, end = max(start, text.first), min(start + len(logits), len(text.ids))
            if begin < end:
                rows, places = slice(begin - start, end - start), slice(begin - text.first, end - text.first)
                targets = torch.tensor(text.targets[places])
                self._found[number][places] = scores[rows].gather(1, targets[:, None])[:, 0]
                self._likeliest[number][places] = best[rows]

    def answers(self) -> list[Answer]:
        """Of all texts, in their order."""
        return [
            (float(found.sum()), likeliest.tolist() == text.targets)
            for text, found, likeliest in zip(self._texts, self._found, self._likeliest, strict=True)
        ]


def log_probabilities(logits: Tensor) -> Tensor:
    """Float32, whatever the logits are."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def pieces(start: int, end: int, most: int) -> Iterable[tuple[int, int]]:
    """A range in pieces of ``most`` at most."""
    for begin in range(start, end, most):
        yield begin, min(begin + most, end)
