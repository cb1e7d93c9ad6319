"""Computes the layers of a pipeline stage, as its leader asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from torch_armllm.engine.execution.adapter_rows import AdapterRuns
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import StepInputs
from torch_armllm.plan.step_result import StepResult


class StageExecutor(StepExecutor):
    """Reads the rows of the stage before, computes its own layers, and sends their rows on.

    Args:
        model: the stage's layers.
        sizes: of the caches.
        settings: further ones of `StepExecutor`.
        place: of this process.  The first stage is given token ids; the last one sends the rows only whose
            logits a step needs.
        link: to the stages before and after.
    """

    def __init__(
        self, model: ServableModel, sizes: ExecutorSizes, *settings: Any, place: RankPlace, link: StageLink
    ) -> None:
        super().__init__(model, sizes, *settings)
        self._link = link
        self._is_first, self._is_last = place.stage == 0, place.stage == place.stages - 1
        self._rows: deque[int] = deque()
        self._adapters_of_logits: deque[AdapterRuns] = deque()

    def holding(self, adapters: AdapterRuns) -> AbstractContextManager[None]:
        """See `StepExecutor.holding`; the first stage keeps those of its logits, which it computes later."""
        if self._is_first:
            self._adapters_of_logits.append(adapters.of_logits())
        return super().holding(adapters.of_tokens())

    def run(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> StepResult:
        """Computes the stage's part of a step; see `StepExecutor.run`.

        Returns:
            No logits: the first stage computes them in `compute_logits`.
        """
        if not self.states:  # other stages have some
            inputs = replace(inputs, state_slots=None)
        if self._is_first:
            self._rows.append(inputs.tokens if rows is None else len(rows))
        else:
            inputs.given = self._link.receive(inputs.tokens)
        with torch.no_grad():
            hidden = self.plan.run(inputs)
        if self._is_last and rows is not None:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
        self._link.send(hidden)
        return StepResult(hidden[:0])

    def compute_logits(self) -> None:
        """Computes this rank's part of the logits of the oldest step under way, on the first stage."""
        if self._is_first:
            with torch.no_grad(), super().holding(self._adapters_of_logits.popleft()):
                self.logits(self._link.receive(self._rows.popleft()))
