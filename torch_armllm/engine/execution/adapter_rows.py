"""The adapters of a step's rows, where the layers of a plan read them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from torch_armllm.engine.step import Step


class AdapterRows:
    """Says to a plan which adapter each token of a step has.

    Args:
        rows: int32 ``(L,)``, that the plan reads; −1 for no adapter, which is the case between steps.
    """

    def __init__(self, rows: Tensor) -> None:
        self._tensor = rows  # keeps the memory alive
        # setting an element of a tensor takes microseconds
        self._rows = (ctypes.c_int32 * len(rows)).from_address(rows.data_ptr())

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Holds a step's adapters while the context lasts; a step without adapters writes nothing."""
        written = 0
        try:
            at = 0
            for sequence, _, count in step.scheduled:
                adapter = sequence.request.adapter
                if adapter is not None:
                    assert at + count <= len(self._rows), "a step has more tokens than there are rows"
                    written = at + count
                    self._rows[at:written] = [adapter.slot] * count
                at += count
            yield
        finally:
            if written:
                self._rows[:written] = [-1] * written
