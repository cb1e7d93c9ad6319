"""Memory that the ranks of one machine share: an anonymous file, which ends with the last of them."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

from torch_armllm.ops.collective import communicator_bytes, open_communicator
from torch_armllm.parallel.mailbox import mailbox_bytes
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace

BUFFER_BYTES = 2 << 20
"""Bytes of each of a rank's two buffers for exchanges; larger exchanges take several rounds."""
SHARED_BYTES = 16 << 30
"""Bytes of the arenas of all stages: the plans of a stage share one.  Those not written take no room."""
_PAGE = 4096


class GroupMemory:
    """The memory of a group: what the exchanges of each stage need, then a mailbox.

    It is no file of ``/dev/shm``: its size is not limited there, and nothing is left when processes are
    killed.  Pages take memory once they are written.

    Args:
        tensor_ranks: number of ranks that exchange columns: all, or those of a stage.
        stages: number of stages.
        file: descriptor of the memory of a group that exists; None: a new group.

    Attributes:
        file: descriptor, which other processes inherit.
        exchanges: for each stage, uint8 for `torch_armllm.ops.collective.open_communicator`.
        mail: uint8, for `torch_armllm.parallel.mailbox.Mailbox`.
    """

    def __init__(self, tensor_ranks: int, stages: int = 1, file: int | None = None) -> None:
        arena = SHARED_BYTES // stages // _PAGE * _PAGE if tensor_ranks > 1 else 0
        each = communicator_bytes(tensor_ranks, BUFFER_BYTES, arena)
        first = each * stages
        size = first + mailbox_bytes(tensor_ranks * stages, stages)
        if file is None:
            file = os.memfd_create("torch_armllm ranks")
            os.ftruncate(file, size)
        self.file = file
        self._map = mmap.mmap(file, size)
        memory: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.exchanges = memory[:first].split(each)
        self.mail = memory[first:]
        # the leader reads the first one before every step, which as a tensor takes 20 µs
        self._failed = [ctypes.c_int64.from_address(each.data_ptr()) for each in self.exchanges]

    def group(self, place: RankPlace, whole_experts: bool = False) -> RankGroup | None:
        """Opens the communicator of a process's stage, and returns its ranks; None if the stage has one."""
        if place.tensor_ranks == 1:
            return None
        own = place.tensor_rank, place.tensor_ranks
        communicator = open_communicator(self.exchanges[place.stage], *own, BUFFER_BYTES)
        return RankGroup(*own, communicator, whole_experts=whole_experts)

    def fail(self, rank: int) -> None:
        """Ends the exchanges that are under way, on all ranks, because a rank has failed."""
        if self.failed_rank is None:
            for each in self._failed:
                each.value = rank + 1

    @property
    def failed_rank(self) -> int | None:
        """The first rank that has failed; None if all are well."""
        failed = self._failed[0].value
        return failed - 1 if failed else None
