"""Requests of the serving benchmark, and the times observed for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        prompt: a string, or the messages of a conversation.
        output_len: max_tokens of the request.
    """

    prompt: str | list[dict[str, Any]]
    output_len: int


@dataclass
class Record:
    """Times of one request, in seconds of one monotonic clock.

    Attributes:
        started: time at which it was sent.
        arrivals: arrival of each chunk with text.
        ended: arrival of the last chunk, with or without text.
        prompt_tokens: the server's count; None if it reports none.
        output_tokens: the server's count, or the number of chunks with text.
        error: the reason of a failure; None if the request completed.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end if the output had no text."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there was only one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between consecutive chunks with text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
