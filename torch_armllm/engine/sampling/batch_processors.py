"""Logit processors of users that see the rows of a whole batch, in the shape of vLLM's `LogitsProcessor`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """Directions of a move between two rows."""

    UNIDIRECTIONAL = auto()
    """The first row becomes the second one, and is free afterwards."""
    SWAP = auto()
    """Both rows change places."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch's rows, in the order in which they take place: removed, added, moved.

    Attributes:
        batch_size: rows afterwards.
        removed: rows that are free.
        added: row, settings, prompt and output of each new sequence.  Its row was free, or has its
            predecessor replaced.  The output is a list that grows as tokens are drawn.
        moved: from row, to row, direction.
    """

    batch_size: int
    removed: GenericSequence[int]
    added: GenericSequence[tuple[int, SamplingParams, list[int], list[int]]]
    moved: GenericSequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Base of users' logit processors that change all rows of a step together.

    Subclasses are given to ``LLM(logits_processors=[…])``, and are created once for an engine, which then
    drafts no tokens: a sequence has one row.

    Args:
        config: the engine's `EngineConfig`.
        device: the CPU.
        is_pin_memory: False.
    """

    @abstractmethod
    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """See the class."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for ``extra_args`` that the processor cannot use."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Returns the changed logits, float32 ``(R, V)``, which may be the given ones, changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the most probable token stays the same, so that greedy steps need no call."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Learns before each `apply` which sequences the rows belong to; None: to the same ones."""


class ProcessedBatch:
    """Sequences as batch processors know them: each keeps its row as long as it takes part in every step.

    Args:
        processors: of the engine.
    """

    def __init__(self, processors: GenericSequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._sequences: list[Sequence] = []
        self._outputs: dict[Sequence, list[int]] = {}

    def changes(self, greedy: bool) -> bool:
        """True if a processor is to be called; ``greedy``: all rows take the most probable token."""
        return any(not (greedy and each.is_argmax_invariant()) for each in self._processors)

    def apply(self, logits: Tensor, sequences: GenericSequence[Sequence], greedy: bool) -> Tensor:
        """Returns changed logits.

        Args:
            logits: float32 ``(R, V)``; may be changed in place.
            sequences: one per row, without duplicates.
            greedy: True if all rows take the most probable token.

        Raises:
            ValueError: a processor returned something else than logits.
        """
        update = self._update(sequences)
        for sequence, output in self._outputs.items():
            output += sequence.token_ids[sequence.prompt_length + len(output) :]
        rows = None
        if self._sequences != list(sequences):
            row_of = {sequence: row for row, sequence in enumerate(sequences)}
            rows = torch.tensor([row_of[sequence] for sequence in self._sequences])
        changed = logits if rows is None else logits[rows]
        for processor in self._processors:
            processor.update_state(update)
            if not (greedy and processor.is_argmax_invariant()):
                changed = _checked(processor, processor.apply(changed), changed)
        return changed if rows is None else logits.index_copy_(0, rows, changed)

    def _update(self, sequences: GenericSequence[Sequence]) -> BatchUpdate | None:
        """Gives rows to new sequences, closes the gaps of those that are gone, and tells what changed."""
        here = set(sequences)
        slots: list[Sequence | None] = [each if each in here else None for each in self._sequences]
        free = [row for row, sequence in enumerate(slots) if sequence is None]
        known, added, moved = set(self._sequences), [], []
        self._outputs = {each: self._outputs.get(each, []) for each in sequences}
        for sequence in sequences:
            if sequence not in known:
                row = free.pop(0) if free else len(slots)
                slots[row : row + 1] = [sequence]
                prompt = list(sequence.request.prompt_token_ids)
                added.append((row, sequence.params, prompt, self._outputs[sequence]))
        removed = free[::-1]
        for row in free:
            while slots and slots[-1] is None:
                slots.pop()
            if row < len(slots):
                moved.append((len(slots) - 1, row, MoveDirectionality.UNIDIRECTIONAL))
                slots[row] = slots.pop()
        self._sequences = [each for each in slots if each is not None]
        assert len(self._sequences) == len(slots) == len(sequences)
        if not (removed or added or moved):
            return None
        return BatchUpdate(len(slots), removed, added, moved)


def _checked(processor: LogitsProcessor, changed: Any, given: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != given.shape:
        got = f"a tensor {tuple(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
        raise ValueError(
            f"the logits processor {type(processor).__name__} returned {got[:200]}; return logits "
            f"{tuple(given.shape)}"
        )
    return changed.to(given.dtype)
