"""Sampling settings of a step, as the tensors that the sampling op accepts."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.token_history import TokenHistory
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.ops.sample import sample, sample_probabilities

_GREEDY_BELOW = 1e-5  # temperature, as in the op


def is_greedy(params: SamplingParams) -> bool:
    """Returns True if the request samples the most probable token."""
    return params.temperature < _GREEDY_BELOW


def sequence_seed(seed: int, index: int) -> int:
    """Returns the Philox key of one sequence of a request, as int64."""
    mixed = seed + index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >> 63 else mixed


def philox_counter(length: int, purpose: int) -> int:
    """Returns the Philox counter of the token after ``length`` others; purposes never overlap."""
    return length + (purpose << 40)


def _penalized(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def _lists(rows: GenericSequence[Tensor]) -> tuple[Tensor, Tensor]:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + row.numel())
    return torch.cat(list(rows)), torch.tensor(offsets)


class SamplingBatch:
    """Settings of one row per sequence, or of several where draft tokens are verified.

    Attributes:
        greedy: True if no row is sampled at random.
        plain: True if, in addition, no row has penalties.
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
        """Samples one token per row, int64 ``(R,)``.

        Args:
            logits: ``(R, V)``.
            prefixes: draft tokens of each row, treated as sampled; None: none.
            purpose: different purposes use independent random numbers.
        """
        return sample(logits, *self._settings(prefixes, purpose), **self._penalty_lists(prefixes))[0]

    def probabilities(
        self, logits: Tensor, prefixes: GenericSequence[GenericSequence[int]] | None = None
    ) -> Tensor:
        """Returns the probabilities from which `draw` samples, float32 ``(R, V)``."""
        settings = (self.temperature, self.top_k, self.top_p, self.min_p)
        return sample_probabilities(logits, *settings, **self._penalty_lists(prefixes))

    def _settings(
        self, prefixes: GenericSequence[GenericSequence[int]] | None, purpose: int
    ) -> tuple[Tensor, ...]:
        steps = self._steps
        if not self.greedy:  # greedy rows use no random numbers
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
