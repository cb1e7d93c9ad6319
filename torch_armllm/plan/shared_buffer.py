"""Integer buffers that Python writes and tensors read."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor


class SharedBuffer:
    """An array of integers on the same memory as tensors.

    Setting an element of a tensor takes microseconds, of an array tens of nanoseconds; a step of eight
    sequences sets forty elements.

    Args:
        code: type code of `array.array`: ``q`` (int64) or ``i`` (int32).
        size: number of elements.
    """

    def __init__(self, code: str, size: int) -> None:
        self.dtype = torch.int64 if code == "q" else torch.int32
        self.items: Any = array(code, bytes(size * self.dtype.itemsize))
        assert self.items.itemsize == self.dtype.itemsize

    def view(self, *shape: int) -> Tensor:
        """Returns the first elements as a tensor on the same memory."""
        count = 1
        for n in shape:
            count *= n
        return torch.frombuffer(self.items, dtype=self.dtype, count=count).view(shape)
