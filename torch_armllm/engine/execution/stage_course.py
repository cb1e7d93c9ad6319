"""The course of a step through a stage of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from torch_armllm.engine.execution.step_feature import NOTHING_HELD, StepFeatures
from torch_armllm.engine.execution.step_layers import StepLayers
from torch_armllm.engine.reports.trace import NO_TRACE, Trace
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.step import StepInputs, StepResult


@dataclass(frozen=True)
class LinkedStage:
    """The stage of a pipeline that a process computes.

    Attributes:
        place: of the process.  The first stage is given token ids; the last one sends the rows only whose
            logits a step needs.
        link: to the stages before and after.
    """

    place: RankPlace
    link: StageLink


class StageCourse:
    """Reads the rows of the stage before, computes this one's layers, and sends their rows on.

    The stages compute different steps at the same time, each in the order in which they begin.  The first one
    finishes a step: it computes the logits of the last one's rows.

    Args:
        stage: that this process computes.
        layers: of the stage, and of the first one the output layer.
        features: of steps.
        trace: records the phases of steps.
        at_work: what holds while this process computes.
    """

    def __init__(
        self,
        stage: LinkedStage,
        layers: StepLayers,
        features: StepFeatures,
        trace: Trace = NO_TRACE,
        at_work: AbstractContextManager[Any] = NOTHING_HELD,
    ) -> None:
        place = stage.place
        self.most_steps, self.shares_logits = place.stages, place.tensor_ranks > 1
        self._is_first, self._is_last = place.stage == 0, place.stage == place.stages - 1
        self._link, self._layers, self._features = stage.link, layers, features
        self._trace, self._at_work = trace, at_work
        self._under_way: deque[tuple[int, AbstractContextManager[None]]] = deque()

    def begin(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """Computes the stage's layers of a step, while other stages compute earlier ones."""
        if not self._is_first:
            inputs.given = self._link.receive(inputs.tokens)
        held = self._features.holding()
        with torch.no_grad(), held:
            hidden = self._layers.plan.run(inputs)
            if self._is_last and rows is not None:
                hidden = hidden[torch.tensor(rows, dtype=torch.int64)]
        self._link.send(hidden)
        if self._is_first:
            self._under_way.append((inputs.tokens if rows is None else len(rows), held))
        self._trace.mark("decode" if rows is None else "prefill")

    def follow(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """Begins a step; the leader says when its logits are to be computed."""
        self.begin(inputs, rows, best)

    def finish(self) -> StepResult:
        """Waits for the last hidden states of the oldest step under way, and returns its logits.

        On other stages than the first nothing is computed, and there are no logits.
        """
        if not self._is_first:
            return StepResult(torch.empty(0, 0))
        count, held = self._under_way.popleft()
        hidden = self._link.receive(count)
        with self._at_work, torch.no_grad(), held:
            logits = self._layers.logits(hidden)
            self._trace.mark("head")
        return StepResult(logits)

    def close(self) -> None:
        """Ends the connections; stages that wait for rows get an error."""
        self._link.close()
