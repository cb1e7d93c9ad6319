"""All bytes that a block, or a state slot, has in the tensors of a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_armllm.system.page_faults import map_pages

Bytes = npt.NDArray[np.uint8]


class Rows:
    """Copies one block or slot out of all layers' tensors, and back.

    Copies are numpy's, which run in the calling thread alone: torch would start a team of threads for them,
    also in a thread of the background.

    Args:
        tensors: contiguous; layers are their first dimension, blocks or slots the second.

    Attributes:
        nbytes: bytes of a block or slot in all tensors together.
        description: dtype and shape of each tensor's part.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        present = [t for t in tensors if t is not None and t.numel()]
        self._parts: list[Bytes] = []
        for t in present:
            row = math.prod(t.shape[2:]) * t.element_size()
            flat: Bytes = t.detach().view(-1).view(torch.uint8).numpy()
            self._parts.append(flat.reshape(t.shape[0], t.shape[1], row))
        self.nbytes = sum(part.shape[0] * part.shape[2] for part in self._parts)
        self.description = [[str(t.dtype), t.shape[0], *t.shape[2:]] for t in present]

    def take(self, index: int) -> Bytes:
        """Returns a copy of a block's bytes."""
        taken = np.empty(self.nbytes, np.uint8)
        for part, piece in zip(self._parts, self._pieces(taken), strict=True):
            piece[...] = part[:, index]
        return taken

    def put(self, index: int, row: Bytes) -> None:
        """Overwrites a block with bytes that `take` returned."""
        for part, piece in zip(self._parts, self._pieces(row), strict=True):
            part[:, index] = piece

    def map_pages(self, count: int) -> None:
        """Has the system map the memory of the first blocks, which are the first to be used."""
        for part in self._parts:
            for layer in part[:, :count]:
                map_pages(layer.ctypes.data, layer.nbytes)

    def _pieces(self, row: Bytes) -> list[Bytes]:
        pieces, begin = [], 0
        for part in self._parts:
            layers, _, size = part.shape
            pieces.append(row[begin : begin + layers * size].reshape(layers, size))
            begin += layers * size
        return pieces
