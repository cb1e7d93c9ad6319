"""Messages as numbers and bytes of a mailbox."""

from __future__ import annotations

import ctypes
from array import array

import torch

from torch_armllm.engine.execution.factor_message import FactorPiece
from torch_armllm.engine.execution.message import ComputeLogits, Message, ReleaseCache, Stop
from torch_armllm.engine.execution.row_order import RowOrder
from torch_armllm.engine.execution.step_message import StepMessage
from torch_armllm.engine.images.image_message import PictureMessage

KINDS: tuple[type[Message], ...] = (
    Stop,
    StepMessage,
    ComputeLogits,
    ReleaseCache,
    FactorPiece,
    RowOrder,
    PictureMessage,
)
"""Types of messages, by the number that a message begins with."""
_HEADER = 3


def encode(message: Message) -> array[int]:
    """Returns the numbers of a message, which its tensors follow."""
    numbers = message.numbers
    nbytes = sum(tensor.nbytes for tensor in message.tensors)
    return array("q", [KINDS.index(type(message)), len(numbers), nbytes, *numbers])


def decode(address: int) -> Message:
    """Returns a copy of the message at an address."""
    kind, count, nbytes = _numbers(address, _HEADER)
    address += 8 * _HEADER
    numbers = _numbers(address, count)
    content = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        ctypes.memmove(content.data_ptr(), address + 8 * count, nbytes)
    return KINDS[kind].of(numbers, content)


def _numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))
