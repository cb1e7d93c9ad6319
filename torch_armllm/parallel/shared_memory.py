"""Memory that the ranks of one machine share: an anonymous file, which ends with the last of them."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from torch_armllm.ops.collective import communicator_bytes
from torch_armllm.parallel.mailbox import mailbox_bytes

BUFFER_BYTES = 2 << 20
"""Bytes of each of a rank's two buffers for exchanges; larger exchanges take several rounds."""
SHARED_BYTES = 16 << 30
"""Bytes of the arena that the plans of all ranks share; those that no step has written take no room."""


class GroupMemory:
    """The memory of a group: what exchanges need, then a mailbox.

    It is no file of ``/dev/shm``: its size is not limited there, and nothing is left when processes are
    killed.  Pages take memory once they are written.

    Args:
        ranks: number of ranks.
        file: descriptor of the memory of a group that exists; None: a new group.

    Attributes:
        file: descriptor, which other processes inherit.
        exchanges: uint8, for `torch_armllm.ops.collective.open_communicator`.
        mail: uint8, for `torch_armllm.parallel.mailbox.Mailbox`.
    """

    def __init__(self, ranks: int, file: int | None = None) -> None:
        first = communicator_bytes(ranks, BUFFER_BYTES, SHARED_BYTES)
        size = first + mailbox_bytes(ranks)
        if file is None:
            file = os.memfd_create("torch_armllm ranks")
            os.ftruncate(file, size)
        self.file = file
        self._map = mmap.mmap(file, size)
        memory: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.exchanges, self.mail = memory[:first], memory[first:]

    def fail(self, rank: int) -> None:
        """Ends the exchanges that are under way, on all ranks, because a rank has failed."""
        failed = self.exchanges[:8].view(torch.int64)
        if int(failed) == 0:
            failed.fill_(rank + 1)

    @property
    def failed_rank(self) -> int | None:
        """The first rank that has failed; None if all are well."""
        failed = int(self.exchanges[:8].view(torch.int64))
        return failed - 1 if failed else None
