"""Requests of the serving benchmark, and the times observed for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        prompt: a text, or the messages of a conversation.
        output_len: most tokens of the answer.
    """

    prompt: str | list[dict[str, Any]]
    output_len: int


@dataclass
class Record:
    """Times of one request, in seconds of one monotonic clock.

    Attributes:
        started: when it was sent.
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
        """Seconds to the first text; to the end if there was none."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each token but the first; None if there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between two chunks with text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
