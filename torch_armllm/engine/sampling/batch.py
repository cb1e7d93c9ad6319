"""The settings of a step's rows as the tensors that the op takes."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.token_history import TokenHistory
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.ops.sample import sample, sample_probabilities

_GREEDY_BELOW = 1e-5  # temperature; the op's


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most probable token is taken."""
    return params.temperature < _GREEDY_BELOW


def sequence_seed(seed: int, index: int) -> int:
    """The seed of one of a request's sequences, as int64: a key of Philox of its own for each."""
    mixed = seed + index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >> 63 else mixed


def philox_counter(length: int, purpose: int) -> int:
    """The counter of Philox for the token behind ``length`` others; those of several purposes never meet."""
    return length + (purpose << 40)


def _penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def _lists(rows: GenericSequence[Tensor]) -> tuple[Tensor, Tensor]:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + row.numel())
    return torch.cat(list(rows)), torch.tensor(offsets)


class SamplingBatch:
    """One row a sequence, or several where drafted tokens are verified.

    Attributes:
        greedy: whether nothing is left to chance.
        plain: whether, besides, the logits are taken as they are.
    """

    def __init__(
        self, sequences: GenericSequence[Sequence], histories: GenericSequence[TokenHistory]
    ) -> None:
        self.sequences = list(sequences)
        params = [sequence.params for sequence in sequences]
        self.greedy = all(is_greedy(p) for p in params)
        self.plain = self.greedy and not any(_penalized(p) for p in params)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32)
        self.min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32)
        self.seeds = torch.tensor(
            [sequence_seed(a.request.seed, a.index) for a in sequences], dtype=torch.int64
        )
        self._steps = torch.zeros(len(params), dtype=torch.int64)
        self._penalized = [_penalized(p) for p in params]
        self._penalties: dict[str, Tensor] = {}
        self._histories = histories
        if any(self._penalized):
            names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            self._penalties = {
                n: torch.tensor([getattr(p, n) for p in params], dtype=torch.float32) for n in names
            }
            none = torch.empty(0, dtype=torch.int64)
            ids, offsets = _lists(
                [
                    history.prompt if p.repetition_penalty != 1 else none
                    for history, p in zip(histories, params, strict=True)
                ]
            )
            self._penalties |= {"prompt_ids": ids, "prompt_offsets": offsets}

    def draw(
        self, logits: Tensor, prefixes: GenericSequence[GenericSequence[int]] | None = None, purpose: int = 0
    ) -> Tensor:
        """One token a row, int64 ``(R,)``.

        Args:
            logits: ``(R, V)``.
            prefixes: drafted tokens of each row that are taken for drawn; None: none.
            purpose: draws of different purposes are independent.
        """
        return sample(logits, *self._settings(prefixes, purpose), **self._penalty_lists(prefixes))[0]

    def probabilities(
        self, logits: Tensor, prefixes: GenericSequence[GenericSequence[int]] | None = None
    ) -> Tensor:
        """What `draw` draws each token with, float32 ``(R, V)``."""
        settings = (self.temperature, self.top_k, self.top_p, self.min_p)
        return sample_probabilities(logits, *settings, **self._penalty_lists(prefixes))

    def _settings(
        self, prefixes: GenericSequence[GenericSequence[int]] | None, purpose: int
    ) -> tuple[Tensor, ...]:
        steps = self._steps
        if not self.greedy:  # nothing is drawn by chance otherwise
            lengths = [a.output_length for a in self.sequences]
            if prefixes is not None:
                lengths = [n + len(prefix) for n, prefix in zip(lengths, prefixes, strict=True)]
            steps = torch.tensor([philox_counter(n, purpose) for n in lengths], dtype=torch.int64)
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, steps

    def _penalty_lists(self, prefixes: GenericSequence[GenericSequence[int]] | None) -> dict[str, Any]:
        if not self._penalties:
            return {}
        none = torch.empty(0, dtype=torch.int64)
        rows = []
        for i, (sequence, history) in enumerate(zip(self.sequences, self._histories, strict=True)):
            prefix = () if prefixes is None else prefixes[i]
            rows.append(history.output(sequence.token_ids, prefix) if self._penalized[i] else none)
        ids, offsets = _lists(rows)
        return {**self._penalties, "output_ids": ids, "output_offsets": offsets}
