"""Limits of the prompt tokens in a step, so that running sequences do not wait long for their next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_MIN_CHUNK = 32
"""Prompt tokens that a step computes however long it takes: prompts must make progress."""
_CONTEXT = 2048
"""Position at which a token costs twice as much as at the beginning: an estimate that later steps correct."""


def _cost(position: int) -> float:
    """Cost of a prompt token relative to one at the beginning: it attends to all tokens before it."""
    return 1 + position / _CONTEXT


@dataclass
class PrefillBudget:
    """Room for prompt tokens in one step.

    Attributes:
        tokens: left of `max_num_batched_tokens`.
        work: limit of ``used``.
        used: cost of the prompt tokens in the step so far, in units of a token at the beginning of a prompt.
    """

    tokens: int
    work: float = inf
    used: float = 0.0

    @property
    def any(self) -> bool:
        """True if at least one token fits."""
        return self.tokens > 0 and self.used < self.work

    def take(self, start: int, count: int, spans: Sequence[tuple[int, int]] = ()) -> int:
        """Reserves up to ``count`` tokens of a prompt from position ``start`` on; returns their number.

        Args:
            start: first position.
            count: most tokens.
            spans: first and last position, exclusive, of tokens that one step computes.  Where the next span
                does not fit, nothing is reserved and no room is left, so that others do not take it.
        """
        cost = _cost(start)
        fitting = count if self.work == inf else int((self.work - self.used) / cost)
        count = min(count, self.tokens, max(fitting, 1 if self.used else _MIN_CHUNK))
        for first, last in spans:
            if first < start + count < last:
                count = (last if first <= start else first) - start
        if count > self.tokens:
            self.tokens = 0
            return 0
        self.tokens -= count
        self.used += count * cost
        return count


class ChunkBudget:
    """Learns from step times how much prompt work fits into a step.

    Past steps show how long decoding alone takes and how much time a prompt token adds; both change little
    from one chunk to the next. Results do not depend on where a prompt is cut into chunks.

    Args:
        max_step_time: target for steps with decode and prompt tokens, in seconds. If decoding alone takes
            more than half of it, the target is twice the time of decoding.
    """

    def __init__(self, max_step_time: float) -> None:
        self._max_step_time = max_step_time
        self._decode_time: float | None = None  # seconds of a step without prompt tokens
        self._time_per_token: float | None = None  # seconds for a token at the beginning of a prompt

    def work(self) -> float:
        """Returns the prompt work that fits into a step together with decoding; see `PrefillBudget.work`."""
        if self._time_per_token is None:
            return inf
        decode_time = self._decode_time or 0.0
        return max(self._max_step_time - decode_time, decode_time) / self._time_per_token

    def record(self, work: float, seconds: float) -> None:
        """Records a step's prompt work and its duration."""
        if work == 0:
            before = self._decode_time
            self._decode_time = seconds if before is None else 0.8 * before + 0.2 * seconds
        elif work >= _MIN_CHUNK:
            added = max(seconds - (self._decode_time or 0.0), seconds / 4)
            latest, previous = added / work, self._time_per_token
            self._time_per_token = latest if previous is None else (previous + latest) / 2
