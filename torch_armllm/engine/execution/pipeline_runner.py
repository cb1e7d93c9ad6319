"""Computes the steps of an engine with a pipeline of processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.execution.adapter_rows import AdapterRuns, adapter_runs
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.step_message import Signal
from torch_armllm.engine.step import Step
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step_result import StepResult


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline as the first one sees them.

    Attributes:
        count: number of stages.
        link: from the last stage and to the next one.
        leader: sends the steps to all other processes.
        have_states: True if any stage has states of recurrent layers.
        share_logits: True if other ranks of the first stage compute a part of the logits.
    """

    count: int
    link: StageLink
    leader: RankLeader
    have_states: bool
    share_logits: bool


class PipelineRunner(PlanRunner):
    """Computes the first layers and the logits of steps; other processes compute the layers between.

    The stages compute different steps at the same time, each in the order in which they begin.

    Args:
        model: the first stage's layers, and the output layer.
        sizes: of the caches.
        stages: of the pipeline.
        settings: further ones of `PlanRunner`.

    Attributes:
        stages: number of stages, which is the number of steps that may be under way.
    """

    def __init__(self, model: ServableModel, sizes: ExecutorSizes, stages: Stages, **settings: Any) -> None:
        super().__init__(model, sizes, leader=stages.leader, **settings)
        self.stages = stages.count
        self._link = stages.link
        self._led, self._shares_logits = stages.leader, stages.share_logits
        self._builder.keeps_states = stages.have_states
        self._rows: deque[tuple[int, AdapterRuns]] = deque()

    def begin(self, step: Step) -> None:
        """Computes the first layers of a step, while other stages compute earlier ones.

        Raises:
            RankFailedError: a stage has failed.
        """
        try:
            with self._at_work, torch.no_grad():
                self._begin(step)
        except Exception as error:
            raise self._fail(error) from error

    def _begin(self, step: Step) -> None:
        self.copy_blocks(step)
        rows: list[int] | None = None
        if step.decode_only:
            inputs = self._builder.decode(step)
        else:
            inputs, rows = self._builder.build(step)
            if len(rows) == inputs.tokens:
                rows = None
        self._led.send(step, inputs, rows, best=False, shown=self._shown)
        self._trace.mark("prepare")
        if not self.states:  # other stages have some
            inputs = replace(inputs, state_slots=None)
        runs = adapter_runs(step)
        with self.holding(runs.of_tokens()):
            hidden = self.plan.run(inputs)
        self._link.send(hidden)
        self._rows.append((inputs.tokens if rows is None else len(rows), runs.of_logits()))
        self._trace.mark("decode" if rows is None else "prefill")

    def _fail(self, error: Exception) -> RankFailedError:
        """Ends all processes, those that wait for rows of this one too; returns the error of the engine."""
        failed = self._led.fail(error)
        self._link.close()
        return failed

    def finish(self) -> StepResult:
        """Waits for the last hidden states of the oldest step under way, and returns its logits.

        Raises:
            RankFailedError: a stage has failed.
        """
        try:
            if self._shares_logits:
                self._led.tell(Signal.LOGITS)
            count, adapters = self._rows.popleft()
            hidden = self._link.receive(count)
            with self._at_work, torch.no_grad(), self.holding(adapters):
                logits = self.logits(hidden)
                self._trace.mark("head")
                return StepResult(logits)
        except Exception as error:
            raise self._fail(error) from error

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Computes a step while no other is under way; see `PlanRunner.compute`."""
        assert not self._rows, "steps are under way"
        self.begin(step)
        return self.finish()
