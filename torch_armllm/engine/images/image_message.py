"""Rows of pictures as a message between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self

from torch_armllm.engine.images.image_input import PictureInput

_MOST_BYTES = 4 << 20
"""Bytes of rows in a message: a step's pictures may have many, which the slots of a mailbox would keep."""


class PictureMessage(NamedTuple):
    """Rows of pictures, of the step that follows.

    Attributes:
        tokens: their numbers in the step.
        rows: ``(n, columns)``; of a message that was read, their bytes.
    """

    tokens: Sequence[int]
    rows: Tensor

    @property
    def numbers(self) -> Sequence[int]:
        """See `Message.numbers`."""
        return self.tokens

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Message.tensors`."""
        return [self.rows]

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """See `Message.of`."""
        return cls(numbers, content)


def picture_messages(shown: PictureInput) -> Iterator[PictureMessage]:
    """Yields the rows of a step's pictures in messages."""
    count = max(1, _MOST_BYTES // (shown.columns * shown.dtype.itemsize))
    for first in range(0, len(shown.written), count):
        part = shown.written[first : first + count]
        yield PictureMessage(part, shown.of(part))
