"""Messages from the leading rank to the others, in memory that they share."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops import LIBRARY

_LINE = 64
SLOTS = 8
"""Messages that the leader may be ahead of a rank, at least."""
_MESSAGES_PER_STAGE = 2
"""A pipeline has a step under way for each stage, and asks for the logits of one in a message of its own."""
SLOT_BYTES = 64 << 20
"""Most bytes of a message; memory that no message has used takes no room."""
_SPIN_NS = 200_000
"""Time that a rank waits for a message without leaving its core: a little more than the leader needs between
two steps.  A thread that sleeps takes about 50 µs to wake."""
_ONCE_MS = 500


def mailbox_bytes(ranks: int, stages: int = 1) -> int:
    """Returns the bytes of memory of a mailbox for ranks of some stages."""
    return _LINE * (1 + ranks) + max(SLOTS, _MESSAGES_PER_STAGE * stages) * SLOT_BYTES


def message_numbers(memory: Tensor, ranks: int) -> list[int]:
    """Returns the number of the latest message, and of the latest one that each of the other ranks has read.

    Args:
        memory: of a mailbox.
        ranks: number of ranks.
    """
    numbers = memory[: _LINE * (1 + ranks)].view(torch.int64)[:: _LINE // 8].tolist()
    return [numbers[0], *numbers[2:]]


class Mailbox:
    """One leader, which posts messages in turn to several slots, and readers, which say what they have read.

    The memory begins with lines of 64 bytes: the number of the latest message, and of the latest one that
    each rank has read.

    Args:
        memory: uint8, `mailbox_bytes` of them, 0 at first.
        ranks: number of ranks; rank 0 posts.
        is_well: called while waiting; raises an error to end the wait.
    """

    def __init__(self, memory: Tensor, ranks: int, is_well: Callable[[], None]) -> None:
        self._memory = memory  # keeps it mapped
        self._base = memory.data_ptr()
        self._slots = self._base + _LINE * (1 + ranks)
        self._readers = range(1, ranks)
        self._is_well = is_well
        self._wait, self._post = _functions()
        self._number = 0
        self._count = (memory.numel() - _LINE * (1 + ranks)) // SLOT_BYTES

    def post(self, numbers: array[int], tensors: Iterable[Tensor] = ()) -> None:
        """Posts a message of int64 numbers and, after them, the contents of contiguous tensors.

        Raises:
            ValueError: it is larger than `SLOT_BYTES`.
        """
        address, count = numbers.buffer_info()
        parts = [(address, 8 * count), *((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)]
        size = sum(count for _, count in parts)
        if size > SLOT_BYTES:
            raise ValueError(f"a step's message to other ranks has {size} bytes; at most {SLOT_BYTES} fit")
        number = self._number + 1
        for reader in self._readers:
            self._wait_for(self._base + _LINE * (1 + reader), number - self._count)
        at = self._slot(number)
        for address, count in parts:
            ctypes.memmove(at, address, count)
            at += count
        self._number = number
        self._post(self._base, number)

    def receive(self) -> int:
        """Waits for the next message and returns its address; it is valid until `done`."""
        self._number += 1
        self._wait_for(self._base, self._number)
        return self._slot(self._number)

    def done(self, rank: int) -> None:
        """Lets the leader reuse the slot of the message that a rank has received."""
        self._post(self._base + _LINE * (1 + rank), self._number)

    def _slot(self, number: int) -> int:
        return self._slots + number % self._count * SLOT_BYTES

    def _wait_for(self, counter: int, value: int) -> None:
        while self._wait(counter, value, _SPIN_NS, _ONCE_MS) < value:
            self._is_well()


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., Any]]:
    wait, post = LIBRARY.armllm_wait_at_least, LIBRARY.armllm_post
    wait.argtypes, wait.restype = (ctypes.c_void_p, *(ctypes.c_int64,) * 3), ctypes.c_int64
    post.argtypes, post.restype = (ctypes.c_void_p, ctypes.c_int64), None
    return wait, post
