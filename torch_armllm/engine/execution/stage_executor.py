"""Computes the layers of a pipeline stage other than the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import StepInputs
from torch_armllm.plan.step_result import StepResult


class StageExecutor(StepExecutor):
    """Reads the rows of the stage before, computes its own layers, and sends their rows on.

    Args:
        model: the stage's layers.
        num_blocks: blocks of the KV cache.
        link: to the stages before and after.
        is_last: True to send only the rows whose logits a step needs.
        settings: see `StepExecutor`.
    """

    def __init__(
        self, model: ServableModel, num_blocks: int, link: StageLink, is_last: bool, **settings: Any
    ) -> None:
        super().__init__(model, num_blocks, **settings)
        self._link, self._is_last = link, is_last

    def run(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> StepResult:
        """Computes the stage's part of a step; see `StepExecutor.run`.

        Returns:
            No logits: the first stage computes them.
        """
        if not self.states:  # other stages have some
            inputs = replace(inputs, state_slots=None)
        inputs.given = self._link.receive(inputs.tokens)
        with torch.no_grad():
            hidden = self.plan.run(inputs)
        if self._is_last and rows is not None:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
        self._link.send(hidden)
        return StepResult(hidden[:0])
