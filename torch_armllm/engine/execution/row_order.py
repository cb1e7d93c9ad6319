"""An order of the leader about bytes of a rank's caches."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self


class RowAct(IntEnum):
    """The thing that a rank does with a block, or with a slot of states."""

    DESCRIBE = 0
    """Sends the fingerprint and the sizes of its caches."""
    TAKE_BLOCK = 1
    """Sends the bytes of a block."""
    TAKE_STATES = 2
    """Sends the bytes of a slot."""
    PUT_BLOCK = 3
    """Receives the bytes of a block."""
    PUT_STATES = 4
    """Receives the bytes of a slot."""
    MAP_BLOCKS = 5
    """Has the system map the memory of the first blocks."""


class RowOrder(NamedTuple):
    """An act, and the number of the block or slot, or of blocks."""

    act: RowAct
    number: int = 0

    @property
    def numbers(self) -> Sequence[int]:
        """See `Message.numbers`."""
        return self

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See `Message.tensors`."""
        return ()

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """See `Message.of`."""
        act, number = numbers
        return cls(RowAct(act), number)
