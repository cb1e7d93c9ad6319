"""The course of a step through the layers of a process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch_armllm.engine.execution.step_feature import NOTHING_HELD, StepFeatures
from torch_armllm.engine.execution.step_layers import StepLayers
from torch_armllm.plan.step import StepInputs, StepResult


class StepCourse(Protocol):
    """Begins steps, and finishes them in the same order.

    Attributes:
        most_steps: number of steps that may be under way together.
        shares_logits: True if other processes compute a part of the logits when this one finishes a step.
    """

    most_steps: int
    shares_logits: bool

    def begin(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """Begins a step; see `StepLayers.run`."""
        ...

    def follow(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """Begins a step of a leader that has begun it, and goes as far as the leader does not say more."""
        ...

    def finish(self) -> StepResult:
        """Returns the result of the oldest step under way."""
        ...

    def close(self) -> None:
        """Ends the connections to other processes, which then get an error."""
        ...


class WholeCourse:
    """The course through layers and head, at once.

    A step is computed when it is finished: after the weights nothing else is in the CPU's caches, so that as
    little as possible follows.

    Args:
        layers: all of them, or a rank's part of each.
        features: of steps.
        at_work: what holds while this process computes.
    """

    most_steps = 1
    shares_logits = False

    def __init__(
        self,
        layers: StepLayers,
        features: StepFeatures,
        at_work: AbstractContextManager[Any] = NOTHING_HELD,
    ) -> None:
        self._layers, self._features, self._at_work = layers, features, at_work
        self._step: tuple[StepInputs, Sequence[int] | None, bool] | None = None

    def begin(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """See `StepCourse.begin`."""
        self._step = inputs, rows, best

    def follow(self, inputs: StepInputs, rows: Sequence[int] | None, best: bool) -> None:
        """See `StepCourse.follow`."""
        self.begin(inputs, rows, best)
        self.finish()

    def finish(self) -> StepResult:
        """Computes the step.

        Raises:
            RuntimeError: there is none.
        """
        if self._step is None:
            raise RuntimeError("no step is under way")
        (inputs, rows, best), self._step = self._step, None
        with self._at_work, self._features.holding():
            return self._layers.run(inputs, rows, best)

    def close(self) -> None:
        """Does nothing: there is no connection."""
