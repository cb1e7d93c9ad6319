"""The adapters of a step's rows, where the layers of a plan read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from torch_armllm.engine.execution.factor_message import FactorPiece, FactorWriter
from torch_armllm.engine.execution.step_feature import Acts, StepFeature
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.lora.slot_set import SlotSet


class RowRun(NamedTuple):
    """Adjacent rows with the same adapter."""

    begin: int
    end: int
    slot: int


class AdapterRuns(NamedTuple):
    """Rows of a step that have adapters: those of tokens, and those of tokens that need logits."""

    tokens: list[RowRun]
    logits: list[RowRun]


NO_ADAPTERS = AdapterRuns([], [])
_Rows: TypeAlias = "ctypes.Array[ctypes.c_int32]"


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
            runs.tokens.append(RowRun(at, at + count, adapter.slot))
            runs.logits.append(RowRun(at_logits, at_logits + logits, adapter.slot))
        at, at_logits = at + count, at_logits + logits
    return runs


class AdapterRows(StepFeature):
    """Says to a plan and to a head which adapter each row of a step has.

    Args:
        slots: that they read.  Their rows have −1 for no adapter, which is the case between steps.
    """

    def __init__(self, slots: SlotSet) -> None:
        self._slots = slots  # keeps the memory alive
        self._runs = NO_ADAPTERS
        # setting an element of a tensor takes microseconds
        self._rows = _numbers(slots.rows)
        self._logit_rows = None if slots.logit_rows is None else _numbers(slots.logit_rows)

    @property
    def acts(self) -> Acts:
        """Writes the adapters that a leader sends."""
        return {FactorPiece: FactorWriter(self._slots).add}

    def write(self, step: Step, ids: Any) -> None:
        """See `StepFeature.write`."""
        self._runs = adapter_runs(step)

    def numbers(self) -> Sequence[int]:
        """See `StepFeature.numbers`: the number of runs of tokens, and all runs."""
        if self._runs is NO_ADAPTERS:
            return ()
        runs = self._runs
        return [len(runs.tokens), *(n for run in (*runs.tokens, *runs.logits) for n in run)]

    def read(self, numbers: list[int]) -> None:
        """See `StepFeature.read`."""
        self._runs = NO_ADAPTERS
        if numbers:
            count, flat = numbers[0], iter(numbers[1:])
            runs = [RowRun(*run) for run in zip(flat, flat, flat, strict=True)]
            self._runs = AdapterRuns(runs[:count], runs[count:])

    def holding(self) -> AbstractContextManager[None] | None:
        """Returns what holds the adapters of rows; None for a step without adapters."""
        return None if self._runs is NO_ADAPTERS else _Held(self._rows, self._logit_rows, self._runs)


class _Held(AbstractContextManager[None]):
    """Holds the adapters of rows while the context lasts, which may be twice: for layers, and for logits."""

    def __init__(self, rows: _Rows, logit_rows: _Rows | None, runs: AdapterRuns) -> None:
        self._each = (rows, runs.tokens), (logit_rows, runs.logits)

    def __enter__(self) -> None:
        try:
            for rows, runs in self._each:
                _write(rows, runs)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for rows, runs in self._each:
            _clear(rows, runs)


def _write(rows: _Rows | None, runs: list[RowRun]) -> None:
    if rows is None or not runs:
        return
    assert runs[-1].end <= len(rows), "a step has more tokens than there are rows"
    for begin, end, slot in runs:
        rows[begin:end] = [slot] * (end - begin)


def _clear(rows: _Rows | None, runs: list[RowRun]) -> None:
    if rows is not None and runs:
        end = min(runs[-1].end, len(rows))
        rows[:end] = [-1] * end


def _numbers(rows: Tensor) -> _Rows:
    return (ctypes.c_int32 * len(rows)).from_address(rows.data_ptr())
