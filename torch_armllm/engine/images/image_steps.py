"""The part of an engine's steps that pictures change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.execution.step_feature import Acts, StepFeature
from torch_armllm.engine.execution.views import Views
from torch_armllm.engine.images.image_input import PictureInput
from torch_armllm.engine.images.image_message import PictureMessage, picture_messages
from torch_armllm.engine.images.token_numbers import TokenNumbers
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.shared_buffer import SharedBuffer


class PictureSteps(StepFeature):
    """A plan that computes tokens of pictures beside those of texts, and what it reads of each token.

    Args:
        plan: reads the numbers, if there are any, and after them the rows.
        rows: of each token; None: a stage of a pipeline that reads those of another one.
        token: id that tokens of pictures have in a step.
        layers: number of early layers that features of pictures are added after.
        numbers: of each token; None: the plan reads none.
    """

    def __init__(
        self,
        plan: NativePlan,
        rows: PictureInput | None,
        token: int,
        layers: int = 0,
        numbers: TokenNumbers | None = None,
    ) -> None:
        self.plan: NativePlan = plan
        self.rows, self.token, self.layers = rows, token, layers
        self.token_numbers = numbers
        self._received: list[PictureMessage] = []

    def reserve(self, tokens: int, sequences: int) -> None:
        """See `StepFeature.reserve`."""
        if self.rows is not None:
            self.rows.reserve(tokens)
        if self.token_numbers is not None:
            columns = self.token_numbers.columns
            buffer = SharedBuffer("q", tokens * columns)
            self._items = buffer.items
            self._number_views = Views(tokens, lambda n: (buffer.view(n, columns),))

    def inputs(self, tokens: int, sequences: int) -> Mapping[str, Any]:
        """See `StepFeature.inputs`."""
        inputs: dict[str, Any] = {}
        if self.token_numbers is not None:
            (inputs["numbers"],) = self._number_views[tokens]
        if self.rows is not None:
            inputs["rows"] = self.rows.view(tokens)
        return inputs

    def write(self, step: Step, ids: Any) -> None:
        """Writes the rows of picture tokens, the id that they have in place of the placeholders', numbers."""
        if self.rows is not None:
            self.rows.clear()
            if not step.decode_only:
                self._write_rows(self.rows, step, ids)
        if self.token_numbers is not None:
            self.token_numbers.write(self._items, step)

    def _write_rows(self, rows: PictureInput, step: Step, ids: Any) -> None:
        at = 0
        for sequence, start, count in step.scheduled:
            shown = sequence.request.pictures
            if shown is not None and start < sequence.prompt_length:
                found = shown.within(start, start + count)
                tokens = [at + position - start for position in shown.positions[found]]
                for token in tokens:
                    ids[token] = self.token
                if tokens:
                    rows.write(tokens, shown.rows[found])
            at += count

    def messages(self, tokens: int) -> Iterator[Message]:
        """Yields the rows of the pictures of a step."""
        return iter(()) if self.rows is None else picture_messages(self.rows)

    def tensors(self, tokens: int, sequences: int) -> Sequence[Tensor]:
        """See `StepFeature.tensors`."""
        return () if self.token_numbers is None else self._number_views[tokens]

    @property
    def acts(self) -> Acts:
        """Keeps the rows of the step that follows, whose memory is there once that is read."""
        return {PictureMessage: self._received.append}

    def read(self, numbers: list[int]) -> None:
        """Writes the rows that messages have brought; other stages than the first embed no tokens."""
        if self.rows is not None:
            self.rows.clear()
            for tokens, content in self._received:
                self.rows.write(tokens, content.view(self.rows.dtype).view(len(tokens), -1))
        self._received.clear()
