"""The adapters of a step's rows, where the layers of a plan read them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from torch_armllm.engine.step import Step


class AdapterRows:
    """Says to a plan and to a head which adapter each row of a step has.

    Args:
        rows: int32 ``(L,)`` of tokens, that the plan reads; −1 for no adapter, which is the case between
            steps.
        logit_rows: likewise of the rows that need logits, that the head reads; None: it reads none.
    """

    def __init__(self, rows: Tensor, logit_rows: Tensor | None = None) -> None:
        self._tensors = rows, logit_rows  # keeps the memory alive
        # setting an element of a tensor takes microseconds
        self._rows = _numbers(rows)
        self._logit_rows = None if logit_rows is None else _numbers(logit_rows)

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Holds a step's adapters while the context lasts; a step without adapters writes nothing."""
        if all(scheduled.sequence.request.adapter is None for scheduled in step.scheduled):
            yield
            return
        written = written_logits = 0
        try:
            at = at_logits = 0
            for scheduled in step.scheduled:
                adapter, count = scheduled.sequence.request.adapter, scheduled.count
                logits = 0 if self._logit_rows is None else len(scheduled.logit_positions)
                if adapter is not None:
                    assert at + count <= len(self._rows), "a step has more tokens than there are rows"
                    written = at + count
                    self._rows[at:written] = [adapter.slot] * count
                    if self._logit_rows is not None:
                        written_logits = at_logits + logits
                        self._logit_rows[at_logits:written_logits] = [adapter.slot] * logits
                at, at_logits = at + count, at_logits + logits
            yield
        finally:
            if written:
                self._rows[:written] = [-1] * written
            if written_logits and self._logit_rows is not None:
                self._logit_rows[:written_logits] = [-1] * written_logits


def _numbers(rows: Tensor) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(rows)).from_address(rows.data_ptr())
