"""The slots of recurrent states, as a feature of steps."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_armllm.engine.execution.step_feature import StepFeature
from torch_armllm.engine.execution.views import Views
from torch_armllm.engine.scheduling.step import StateMove, Step
from torch_armllm.plan.shared_buffer import SharedBuffer

_MOVES = ("copy", "swap_out", "swap_in")


class StepStates(StepFeature):
    """Moves states before a step, and says from which slots it reads them and to which it saves them.

    Args:
        states: of this process; empty for a stage of a pipeline of which only others have some.
        swapped: states of swap memory.
    """

    def __init__(self, states: Sequence[Tensor], swapped: Sequence[Tensor] = ()) -> None:
        self._states, self._swapped = list(states), swapped
        self._moves: Sequence[StateMove] = ()

    def reserve(self, tokens: int, sequences: int) -> None:
        """See `StepFeature.reserve`."""
        slots, saves = SharedBuffer("q", sequences), SharedBuffer("q", tokens)
        self._slots, self._saves = slots.items, saves.items
        self._saves[:] = array("q", [-1]) * tokens
        self._saved_rows: list[int] = []
        self._slot_views = Views(sequences, lambda n: (slots.view(n),))
        self._save_views = Views(tokens, lambda n: (saves.view(n),))

    def inputs(self, tokens: int, sequences: int) -> Mapping[str, Any]:
        """See `StepFeature.inputs`."""
        if not self._states:
            return {}
        slots, saves = self.tensors(tokens, sequences)
        return {"states": self._states, "state_slots": slots, "save_slots": saves}

    def write(self, step: Step, ids: Any) -> None:
        """Moves states, and writes the slots of sequences and those of the states that the step saves."""
        self._move(step.state_moves)
        slots = [s.sequence.state for s in step.scheduled if s.sequence.state is not None]
        self._slots[: len(slots)] = array("q", slots)
        for row in self._saved_rows:
            self._saves[row] = -1
        self._saved_rows.clear()
        if not step.saves_states:
            return
        at = 0
        for sequence, start, count in step.scheduled:
            for length, slot in sequence.saves.items():
                if start < length <= start + count:
                    row = at + length - start - 1
                    self._saves[row] = slot
                    self._saved_rows.append(row)
            at += count

    def tensors(self, tokens: int, sequences: int) -> Sequence[Tensor]:
        """See `StepFeature.tensors`."""
        return *self._slot_views[sequences], *self._save_views[tokens]

    def numbers(self) -> Sequence[int]:
        """See `StepFeature.numbers`."""
        return [n for move in self._moves for n in (_MOVES.index(move.kind), move.source, move.target)]

    def read(self, numbers: list[int]) -> None:
        """See `StepFeature.read`."""
        triples = zip(*(iter(numbers),) * 3, strict=True)
        self._move([StateMove(_MOVES[kind], *ends) for kind, *ends in triples])  # type: ignore[arg-type]

    def _move(self, moves: Sequence[StateMove]) -> None:
        self._moves = moves
        for move in moves:
            sources = self._swapped if move.kind == "swap_in" else self._states
            targets = self._swapped if move.kind == "swap_out" else self._states
            for source, target in zip(sources, targets, strict=True):
                target[:, move.target] = source[:, move.source]
