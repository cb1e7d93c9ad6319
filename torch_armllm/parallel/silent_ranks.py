"""Ranks that keep the leader waiting, as the memory of their group shows them."""

from __future__ import annotations

import torch

from torch_armllm.parallel.mailbox import message_numbers
from torch_armllm.parallel.shared_memory import GroupMemory

_PER_LINE = 8
"""int64 numbers of a line of 64 bytes."""


class SilentRanks:
    """Finds ranks that are behind others and do not move.

    Every rank writes the number of its latest exchange and of the latest message that it has read.  A rank
    that waits for another one of its stage has as many exchanges as the furthest of them, so only the one
    that holds the others up is found.  A stage that waits for another one may leave messages unread: those
    count where no rank is behind in exchanges.

    Args:
        memory: of the group.
        tensor_ranks: number of ranks that exchange columns: all, or those of a stage.
        stages: number of stages.
        polls: polls in a row after which a rank that has not moved is silent.  Polls are counted, and not
            time, so that ranks which the terminal or a debugger stops together with rank 0 are not silent.
    """

    def __init__(self, memory: GroupMemory, tensor_ranks: int, stages: int, polls: int) -> None:
        # line 0 is the number of the rank that failed
        self._exchanges = [
            each.view(torch.int64)[_PER_LINE::_PER_LINE][:tensor_ranks] for each in memory.exchanges
        ]
        self._mail, self._ranks = memory.mail, tensor_ranks * stages
        self._polls = polls
        self._seen: dict[int, tuple[int, int]] = {}
        self._count: dict[int, int] = {}

    def poll(self) -> list[int]:
        """Returns the ranks that are silent."""
        exchanges = [each.tolist() for each in self._exchanges]
        exchanged = [number for stage in exchanges for number in stage]
        # the leader may be behind the others of its stage while it is busy with something else
        furthest = [exchanges[0][0], *map(max, exchanges[1:])]
        behind = [number < most for stage, most in zip(exchanges, furthest, strict=True) for number in stage]
        read = message_numbers(self._mail, self._ranks)
        unread = [False if any(behind) else number < read[0] for number in read]
        silent = []
        for rank in range(1, self._ranks):
            now = exchanged[rank], read[rank]
            moved = self._seen.get(rank) != now
            waits = behind[rank] or unread[rank]
            self._count[rank] = 0 if moved or not waits else self._count[rank] + 1
            self._seen[rank] = now
            if self._count[rank] >= self._polls:
                silent.append(rank)
        return silent
