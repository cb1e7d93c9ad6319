"""Where packed weights wait until all of them are made, beside a model that is still whole."""

from __future__ import annotations

import tempfile
from typing import IO

import torch
from torch import Tensor, nn

_IN_MEMORY = 16 << 20


class Spool:
    """Holds the buffers of modules: a little in memory, the rest in a temporary file.

    Without it, a model that must be able to stay as it is would need the memory of its float weights and of
    its packed ones at the same time.  Where no file can be written, memory has to do.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        """Bytes that may stay ``in_memory`` before a file is used."""
        self._left = in_memory
        self._file: IO[bytes] | None = None
        self._full = False
        self._held: dict[nn.Module, dict[str, Tensor | tuple[int, Tensor]]] = {}

    def store(self, module: nn.Module) -> None:
        """Takes a module's buffers; empty ones stay in their place."""
        held = self._held.setdefault(module, {})
        for name, buffer in list(module.named_buffers(recurse=False)):
            held[name] = self._put(buffer)
            module._buffers[name] = torch.empty_like(buffer, device="meta")

    def load(self, module: nn.Module) -> None:
        """Gives a module its buffers back."""
        for name, held in self._held.pop(module, {}).items():
            module._buffers[name] = held if isinstance(held, Tensor) else self._read(*held)

    def _put(self, tensor: Tensor) -> Tensor | tuple[int, Tensor]:
        if tensor.nbytes <= self._left or self._full:
            self._left -= tensor.nbytes
            return tensor
        try:
            if self._file is None:
                # closed, and gone, with the spool
                self._file = tempfile.TemporaryFile(prefix="torch_armllm-", buffering=0)  # noqa: SIM115
            begin = self._write(self._file, tensor)
        except OSError:  # a full or a read-only disk
            self._full = True
            return tensor
        return begin, torch.empty_like(tensor, device="meta")

    @staticmethod
    def _write(file: IO[bytes], tensor: Tensor) -> int:
        begin = file.seek(0, 2)
        rest = _bytes(tensor.contiguous())
        while rest:
            rest = rest[file.write(rest) :]
        return begin

    def _read(self, begin: int, like: Tensor) -> Tensor:
        assert self._file is not None
        self._file.seek(begin)
        tensor = torch.empty_like(like, device="cpu")
        room = _bytes(tensor)
        while room:
            count = self._file.readinto(room)  # type: ignore[attr-defined]  # typing knows no raw files
            if not count:
                raise OSError("the temporary file of the quantised weights has lost its end")
            room = room[count:]
        return tensor


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
