"""Limits of each client, so that one of them cannot take the server from the others."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch_armllm.server.errors import ApiError

CLIENT: ContextVar[bytes] = ContextVar("client", default=b"")
"""The digest of the key with which the current request came; empty without keys."""

_RETRY_AFTER = 2
"""Seconds after which a client with too many requests may try again."""


class ClientLimits:
    """Counts the sequences and the tokens of each client.

    Args:
        max_sequences: sequences of one client that run or wait; None: no limit.
        tokens_per_minute: prompt and output tokens of one client; None: no limit.  Unused ones are kept for a
            minute.
        clock: returns seconds.
    """

    def __init__(
        self,
        max_sequences: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sequences = max_sequences
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._sequences: Counter[bytes] = Counter()
        self._budgets: dict[bytes, _Budget] = {}

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Admits sequences of the current client for the duration of the block.

        Raises:
            ApiError: the client would have too many sequences, or has used up its tokens.
        """
        client = CLIENT.get()
        self._check_sequences(client, sequences)
        self._check_tokens(client)
        self._sequences[client] += sequences
        try:
            yield
        finally:
            self._sequences[client] -= sequences
            if not self._sequences[client]:
                del self._sequences[client]

    def charge(self, tokens: int) -> None:
        """Counts computed tokens of the current client."""
        if self._tokens_per_minute is not None:
            self._budget(CLIENT.get()).tokens -= tokens

    def _check_sequences(self, client: bytes, new: int) -> None:
        most = self._max_sequences
        if most is None:
            return
        if new > most:
            text = (
                f"this request has {new} sequences, which are prompts times n, and a client may have {most}: "
                "send fewer prompts, or lower n"
            )
            raise ApiError(400, text, None, "too_many_sequences")
        if (running := self._sequences[client]) + new > most:
            text = f"this client has {running} sequences, and {most} are allowed; try again later"
            raise _refusal(text, "client_requests", _RETRY_AFTER)

    def _check_tokens(self, client: bytes) -> None:
        rate = self._tokens_per_minute
        if rate is not None and (left := self._budget(client).tokens) < 1:
            seconds = max(1, math.ceil((1 - left) * 60 / rate))
            text = f"this client has used up its {rate} tokens a minute; try again in {seconds} seconds"
            raise _refusal(text, "client_tokens", seconds)

    def _budget(self, client: bytes) -> _Budget:
        """Returns the client's budget as it is now."""
        most, now = float(self._tokens_per_minute or 0), self._clock()
        budget = self._budgets.setdefault(client, _Budget(most, now))
        budget.tokens = min(most, budget.tokens + max(0.0, now - budget.time) * most / 60)
        budget.time = now
        return budget


@dataclass
class _Budget:
    """Tokens that a client may compute; below zero if it has taken more."""

    tokens: float
    time: float


def _refusal(text: str, code: str, seconds: int) -> ApiError:
    return ApiError(429, text, None, code, {"Retry-After": str(seconds)})
