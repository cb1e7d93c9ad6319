"""Sample of a model's results: what a plan has to reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = (13, 7, 1, 1, 1)
"""New tokens of each step: a prompt, a chunk after it that crosses a block's end, and decode steps."""
_JUDGED = (13, 7, 3)
"""Tokens that are judged together: prompt, chunk, decode steps."""


@dataclass(frozen=True)
class Sample:
    """Token ids, and the hidden states that a captured graph computes for them before any pass.

    Attributes:
        input_ids, position_ids: int64 ``(1, T)``.
        hidden: float32 ``(T, hidden)``.
        given: rows ``(T, columns)`` or types ``(T,)`` that the graph is given beside the ids; None for most
            models.
        encoder: keys and values ``(heads, S, size)`` of an encoder's tokens for each layer of a decoder.
        rounding: error of the modules' own forward, which rounds in other places than the graph, or of the
            graph on embeddings whose last bits differ, whichever is larger.
    """

    input_ids: Tensor
    position_ids: Tensor
    hidden: Tensor
    rounding: float = 0.0
    given: Tensor | None = None
    encoder: Sequence[tuple[Tensor, Tensor]] = ()
    steps: tuple[int, ...] = STEPS
    """New tokens of each step that computes the sample; the last one is cut."""

    def error(self, hidden: Tensor) -> float:
        """Returns the relative error of hidden states ``(T, hidden)`` or ``(1, T, hidden)``.

        It is the largest median of ``‖h - expected‖ / ‖expected‖`` over the prompt, the chunk and the decode
        steps.  A median ignores single tokens, which rounding may send to other experts.  Values that are
        not finite where the expected ones are make the error infinite.
        """
        errors = self._token_errors(hidden)
        return max(float(part.median()) for part in errors.split(parts(len(errors), _JUDGED)))

    def strict_error(self, hidden: Tensor) -> float:
        """Returns the second largest relative error of a token, for results that differ by float32 rounding.

        Such rounding hardly ever sends a token to another expert; a wrong rewrite may concern few tokens.
        """
        errors = self._token_errors(hidden)
        return float(errors.topk(min(2, len(errors))).values[-1])

    def _token_errors(self, hidden: Tensor) -> Tensor:
        rows = hidden.float().reshape(self.hidden.shape)
        norms = self.hidden.norm(dim=-1).clamp(min=1e-30)
        errors: Tensor = (rows - self.hidden).norm(dim=-1) / norms
        return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))


def sample_ids(vocab_size: int, tokens: int, seed: int = 0) -> Tensor:
    """Returns fixed random token ids ``(1, tokens)``, without the first few, which are often special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(3, vocab_size - 1), vocab_size, (1, tokens), generator=generator)


def parts(tokens: int, sizes: Sequence[int] = STEPS) -> list[int]:
    """Returns sizes that add up to a number of tokens; the last one is cut."""
    found = []
    for size in sizes:
        if tokens > 0:
            found.append(min(size, tokens))
        tokens -= size
    return found
