"""How much of a prompt a step may read while others wait for their next token."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_LEAST = 32
"""Tokens of a prompt that a step reads however long it takes: prompts must come to their end."""
_CONTEXT = 2048
"""Positions behind which a token costs twice as much as at the beginning: a guess that steps correct."""


def _cost(position: int) -> float:
    """What a token of a prompt costs beside one at the beginning: it attends to all before it."""
    return 1 + position / _CONTEXT


@dataclass
class PrefillBudget:
    """What a step has left for prompts.

    Attributes:
        tokens: of `max_num_batched_tokens`.
        work: in tokens at the beginning of a prompt.
        taken: of that work.
    """

    tokens: int
    work: float = inf
    taken: float = 0.0

    @property
    def any(self) -> bool:
        """Whether there is room for a token."""
        return self.tokens > 0 and self.taken < self.work

    def take(self, start: int, wanted: int) -> int:
        """Takes room for tokens of a prompt from a position on, where there is any; returns for how many."""
        cost = _cost(start)
        fitting = wanted if self.work == inf else int((self.work - self.taken) / cost)
        count = min(wanted, self.tokens, max(fitting, 1 if self.taken else _LEAST))
        self.tokens -= count
        self.taken += count * cost
        return count


class ChunkBudget:
    """Learns what steps take, and how much of prompts fits into the time that one may take.

    The last steps tell what sequences alone take and what a token of a prompt adds: from one chunk of a
    prompt to the next that changes little.  Results do not depend on where a prompt is cut.

    Args:
        most: seconds of a step that writes sequences and reads prompts; where sequences alone take more than
            half of it, twice what they take.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._alone: float | None = None  # seconds
        self._rate: float | None = None  # seconds for a token at the beginning of a prompt

    def work(self) -> float:
        """What a step with sequences has room for; see `PrefillBudget`."""
        if self._rate is None:
            return inf
        alone = self._alone or 0.0
        return max(self._most - alone, alone) / self._rate

    def note(self, work: float, seconds: float) -> None:
        """Takes note of a step that read so much of prompts and took so long."""
        if work == 0:
            self._alone = seconds if self._alone is None else 0.8 * self._alone + 0.2 * seconds
        elif work >= _LEAST:
            added = max(seconds - (self._alone or 0.0), seconds / 4)
            rate = added / work
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
