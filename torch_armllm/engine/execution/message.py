"""A message of the leader to the other processes, and those without contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from typing_extensions import Self


class Message(Protocol):
    """A message: numbers, and tensors that follow them."""

    @property
    def numbers(self) -> Sequence[int]:
        """Everything but the tensors."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Contiguous tensors, which are sent as bytes."""
        ...

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """Returns the message of these numbers, and of the bytes of all tensors, uint8 ``(n,)``."""
        ...


class Signal:
    """A message without contents."""

    numbers: Sequence[int] = ()
    tensors: Sequence[Tensor] = ()

    @classmethod
    def of(cls, numbers: list[int], content: Tensor) -> Self:
        """See `Message.of`."""
        return cls()


class Stop(Signal):
    """Ends the rank."""


class ComputeLogits(Signal):
    """Lets a rank of a pipeline's first stage compute its logits of the oldest step under way."""


class ReleaseCache(Signal):
    """Lets a rank give the memory of its KV cache back to the system."""
