"""Divergence of logits from the float model's, text by text."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from torch_armllm.evaluation.paired_tests import Estimate, weighted


class _Text(NamedTuple):
    """Sums over a text: KL, loss and its change in nats, and tokens with the same most likely successor."""

    nats: float
    loss: float
    change: float
    same: int
    tokens: int


class Divergence:
    """Divergence figures over texts, with the standard errors that independent texts give.

    Tokens of a text are not independent, so the error is that of the means of texts; it is NaN for one text.
    """

    def __init__(self) -> None:
        self.texts: list[_Text] = []

    def add(self, expected: Tensor, actual: Tensor, tokens: Tensor) -> None:
        """Adds a text.

        Args:
            expected: logits ``(n, V)`` of the float model.
            actual: logits ``(n, V)`` of the quantized model.
            tokens: ids ``(n,)`` of the text.
        """
        expected, actual = expected.float().log_softmax(-1), actual.float().log_softmax(-1)
        nats = (expected.exp() * (expected - actual)).sum(-1).double().sum()
        after = tokens[1:, None]
        base, loss = (-float(p[:-1].gather(1, after).double().sum()) for p in (expected, actual))
        same = int((expected.argmax(-1) == actual.argmax(-1)).sum())
        self.texts.append(_Text(float(nats), loss, loss - base, same, len(tokens)))

    @property
    def kl(self) -> Estimate:
        """Mean KL(float ‖ quantized) in nats per token."""
        return weighted([(text.nats, text.tokens) for text in self.texts])

    @property
    def perplexity(self) -> Estimate:
        """Perplexity of the texts."""
        return _exponential(weighted([(text.loss, text.tokens - 1) for text in self.texts]))

    @property
    def ratio(self) -> Estimate:
        """Perplexity over that of the float model, paired by text."""
        return _exponential(weighted([(text.change, text.tokens - 1) for text in self.texts]))

    @property
    def agreement(self) -> Estimate:
        """Share of tokens with the same most likely successor."""
        return weighted([(text.same, text.tokens) for text in self.texts])


def _exponential(estimate: Estimate) -> Estimate:
    value = math.exp(estimate.value)
    return Estimate(value, value * estimate.stderr)
