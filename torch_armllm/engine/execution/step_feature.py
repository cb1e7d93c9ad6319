"""A feature that steps have beside the tokens of texts, and the features of an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor

from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.plan.step import Plan

Acts = Mapping[type[Message], Callable[[Any], None]]
"""The acts of a process that follow from messages, by their types."""
NOTHING_HELD = nullcontext()
"""Of steps that need nothing."""


class StepFeature:
    """Something that steps have beside the tokens of texts: a subclass overrides what it needs.

    Each process of an engine has an object of the same features, in the same order. That of the process which
    schedules writes what a step has; the others read it from the message of the step.

    Attributes:
        plan: computes the steps in the place of the model's own plan; None: it is not changed.
        kept_columns: columns of the plan's results that are returned beside the logits; None: there are none.
    """

    plan: Plan | None = None
    kept_columns: range | None = None

    def reserve(self, tokens: int, sequences: int) -> None:
        """Makes room for steps of up to so many tokens and sequences; earlier views are no longer written."""

    def inputs(self, tokens: int, sequences: int) -> Mapping[str, Any]:
        """Returns fields of `StepInputs` of steps of a size: views of what is written or read."""
        return {}

    def write(self, step: Step, ids: Any) -> None:
        """Takes what a step has.

        Args:
            step: to be computed.
            ids: an array of the token ids, which may be changed.
        """

    def messages(self, tokens: int) -> Iterator[Message]:
        """Yields messages that are sent before a step of so many tokens."""
        return iter(())

    def numbers(self) -> Sequence[int]:
        """Returns what was written, for the message of the step."""
        return ()

    def tensors(self, tokens: int, sequences: int) -> Sequence[Tensor]:
        """Returns further contents of the message: int64 tensors, which the receiver overwrites."""
        return ()

    def read(self, numbers: list[int]) -> None:
        """Takes what a message says of a step, in the place of `write`."""

    @property
    def acts(self) -> Acts:
        """Acts that follow from messages of its own."""
        return {}

    def holding(self) -> AbstractContextManager[None] | None:
        """Returns what must hold while the step is computed that was written or read; None: nothing."""
        return None


class StepFeatures:
    """The features of the steps of one process.

    Args:
        features: in an order that all processes know.
    """

    def __init__(self, features: Sequence[StepFeature] = ()) -> None:
        self._features = tuple(features)
        self.plan = next((each.plan for each in self if each.plan is not None), None)
        kept = (each.kept_columns for each in self if each.kept_columns is not None)
        self.kept_columns: range | None = next(kept, None)

    def __iter__(self) -> Iterator[StepFeature]:
        return iter(self._features)

    def reserve(self, tokens: int, sequences: int) -> None:
        """Makes room for steps; see `StepFeature.reserve`."""
        for feature in self._features:
            feature.reserve(tokens, sequences)

    def inputs(self, tokens: int, sequences: int) -> dict[str, Any]:
        """Returns fields of `StepInputs`; see `StepFeature.inputs`."""
        return {name: field for each in self for name, field in each.inputs(tokens, sequences).items()}

    def tensors(self, tokens: int, sequences: int) -> list[Tensor]:
        """Returns tensors of the message of a step; see `StepFeature.tensors`."""
        return [tensor for each in self for tensor in each.tensors(tokens, sequences)]

    @property
    def acts(self) -> dict[type[Message], Callable[[Any], None]]:
        """Acts that follow from the messages of all features."""
        return {kind: act for each in self for kind, act in each.acts.items()}

    def holding(self) -> AbstractContextManager[None]:
        """Returns what must hold while that step is computed; it may be used twice."""
        held = [each for feature in self._features if (each := feature.holding()) is not None]
        if not held:
            return NOTHING_HELD
        return held[0] if len(held) == 1 else _All(held)


NO_FEATURES = StepFeatures()
"""Those of steps of texts alone."""


class _All(AbstractContextManager[None]):
    """Several context managers as one."""

    def __init__(self, held: Sequence[AbstractContextManager[None]]) -> None:
        self._held = held
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for each in self._held:
            self._stack.enter_context(each)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
