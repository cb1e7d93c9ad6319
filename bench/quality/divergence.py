"""Divergence of logits from the float model's, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Divergence:
    """Sums of divergence figures over tokens.

    Attributes:
        nats: of KL(float ‖ quantized).
        loss: negative log-likelihoods of the tokens that follow.
        same: tokens whose most likely successor is the float model's.
        positions, followed: tokens counted in the first and third, and in the second.
    """

    nats: float = 0.0
    loss: float = 0.0
    same: int = 0
    positions: int = 0
    followed: int = 0

    def add(self, expected: Tensor, actual: Tensor, tokens: Tensor) -> None:
        """Add the logits ``(n, V)`` of both models on a text of tokens ``(n,)``."""
        expected, actual = expected.float().log_softmax(-1), actual.float().log_softmax(-1)
        self.nats += float((expected.exp() * (expected - actual)).sum())
        self.loss -= float(actual[:-1].gather(1, tokens[1:, None]).sum())
        self.same += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        self.positions += len(tokens)
        self.followed += len(tokens) - 1

    @property
    def kl(self) -> float:
        """Mean KL divergence in nats per token."""
        return self.nats / self.positions

    @property
    def perplexity(self) -> float:
        """Perplexity of the text."""
        return math.exp(self.loss / self.followed)

    @property
    def agreement(self) -> float:
        """Share of tokens with the same most likely successor."""
        return self.same / self.positions
