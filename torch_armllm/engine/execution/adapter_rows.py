"""The adapters of a step's rows, where the layers of a plan read them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from torch_armllm.engine.step import Step
from torch_armllm.lora.slot_set import SlotSet


class Run(NamedTuple):
    """Adjacent rows with the same adapter."""

    begin: int
    end: int
    slot: int


class AdapterRuns(NamedTuple):
    """Rows of a step that have adapters: those of tokens, and those of tokens that need logits."""

    tokens: list[Run]
    logits: list[Run]

    def of_tokens(self) -> AdapterRuns:
        """Returns the rows of tokens alone."""
        return AdapterRuns(self.tokens, [])

    def of_logits(self) -> AdapterRuns:
        """Returns the rows that need logits alone."""
        return AdapterRuns([], self.logits)


NO_ADAPTERS = AdapterRuns([], [])


def adapter_runs(step: Step) -> AdapterRuns:
    """Returns the rows of a step that have adapters, which is quick for a step without adapters."""
    if all(scheduled.sequence.request.adapter is None for scheduled in step.scheduled):
        return NO_ADAPTERS
    runs = AdapterRuns([], [])
    at = at_logits = 0
    for scheduled in step.scheduled:
        adapter, count = scheduled.sequence.request.adapter, scheduled.count
        logits = len(scheduled.logit_positions)
        if adapter is not None:
            runs.tokens.append(Run(at, at + count, adapter.slot))
            runs.logits.append(Run(at_logits, at_logits + logits, adapter.slot))
        at, at_logits = at + count, at_logits + logits
    return runs


class AdapterRows:
    """Says to a plan and to a head which adapter each row of a step has.

    Args:
        slots: that they read.  Their rows have −1 for no adapter, which is the case between steps.
    """

    def __init__(self, slots: SlotSet) -> None:
        self._tensors = slots.rows, slots.logit_rows  # keeps the memory alive
        # setting an element of a tensor takes microseconds
        self._rows = _numbers(slots.rows)
        self._logit_rows = None if slots.logit_rows is None else _numbers(slots.logit_rows)

    @contextmanager
    def hold(self, runs: AdapterRuns) -> Iterator[None]:
        """Holds the adapters of rows while the context lasts; a step without adapters writes nothing."""
        try:
            _write(self._rows, runs.tokens)
            _write(self._logit_rows, runs.logits)
            yield
        finally:
            _clear(self._rows, runs.tokens)
            _clear(self._logit_rows, runs.logits)


def _write(rows: ctypes.Array[ctypes.c_int32] | None, runs: list[Run]) -> None:
    if rows is None or not runs:
        return
    assert runs[-1].end <= len(rows), "a step has more tokens than there are rows"
    for begin, end, slot in runs:
        rows[begin:end] = [slot] * (end - begin)


def _clear(rows: ctypes.Array[ctypes.c_int32] | None, runs: list[Run]) -> None:
    if rows is not None and runs:
        end = min(runs[-1].end, len(rows))
        rows[:end] = [-1] * end


def _numbers(rows: Tensor) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(rows)).from_address(rows.data_ptr())
