"""What is asked, and what was seen of the answer."""

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
    """One request's course; times are seconds of one monotonic clock.

    Attributes:
        started: when it was sent.
        arrivals: when each piece of the answer came that has text in it.
        ended: when the last piece came, with or without text.
        prompt_tokens: as the server counts them; None: it does not say.
        output_tokens: as the server counts them, or else the pieces with text.
        error: why there is no answer; None: there is one.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end, if there was none."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.started

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each token but the first; None: there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between two pieces with text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
