"""Integers that Python and tensors share."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor


class SharedBuffer:
    """Integers that Python writes one by one and tensors see.

    An element of a tensor takes microseconds to set, one of an array tens of nanoseconds; a step of eight
    sequences sets forty of them.

    Args:
        code: of `array.array`: ``q`` (int64) or ``i`` (int32).
        size: elements.
    """

    def __init__(self, code: str, size: int) -> None:
        self.dtype = torch.int64 if code == "q" else torch.int32
        self.items: Any = array(code, bytes(size * self.dtype.itemsize))
        assert self.items.itemsize == self.dtype.itemsize

    def view(self, *shape: int) -> Tensor:
        """The first elements, on the same memory."""
        count = 1
        for n in shape:
            count *= n
        return torch.frombuffer(self.items, dtype=self.dtype, count=count).view(shape)
