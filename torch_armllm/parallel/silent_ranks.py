"""Ranks that keep the leader waiting, as the memory of their group shows them."""

from __future__ import annotations

import torch

from torch_armllm.parallel.mailbox import message_numbers
from torch_armllm.parallel.shared_memory import GroupMemory

_PER_LINE = 8
"""int64 numbers of a line of 64 bytes."""


class SilentRanks:
    """Finds ranks that are behind rank 0 and do not move.

    Every rank writes the number of its latest exchange and of the latest message that it has read.  A rank
    that waits for another has the same numbers as rank 0, so only the one that holds the others up is found.

    Args:
        memory: of the group.
        ranks: number of ranks.
        polls: polls in a row after which a rank that has not moved is silent.  Polls are counted, and not
            time, so that ranks which the terminal or a debugger stops together with rank 0 are not silent.
    """

    def __init__(self, memory: GroupMemory, ranks: int, polls: int) -> None:
        # line 0 is the number of the rank that failed
        self._exchanges = memory.exchanges.view(torch.int64)[_PER_LINE::_PER_LINE][:ranks]
        self._mail, self._ranks = memory.mail, ranks
        self._polls = polls
        self._seen: dict[int, tuple[int, int]] = {}
        self._count: dict[int, int] = {}

    def poll(self) -> list[int]:
        """Returns the ranks that are silent."""
        exchanges, read = self._exchanges.tolist(), message_numbers(self._mail, self._ranks)
        silent = []
        for rank in range(1, self._ranks):
            now = exchanges[rank], read[rank]
            waits = exchanges[rank] < exchanges[0] or read[rank] < read[0]
            moved = self._seen.get(rank) != now
            self._count[rank] = 0 if moved or not waits else self._count[rank] + 1
            self._seen[rank] = now
            if self._count[rank] >= self._polls:
                silent.append(rank)
        return silent
