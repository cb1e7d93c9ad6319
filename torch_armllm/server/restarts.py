"""Restarts of engines that have failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch_armllm.server.errors import ApiError

RETRY_AFTER = 5
"""Seconds after which a client may ask an engine again that is rebuilt."""


class RestartLimit:
    """Allows a number of restarts within any window of time.

    Args:
        most: restarts within a window.
        window: seconds.
        clock: returns seconds.
    """

    def __init__(self, most: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._window = window
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> bool:
        """Counts a restart; False if the window has no more of them."""
        now = self._clock()
        while self._times and now - self._times[0] >= self._window:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True


@dataclass
class MissingEngine:
    """A model whose engine has failed and was taken down.

    Attributes:
        gave_up: true once no more restarts are tried.
    """

    gave_up: bool = False

    def error(self) -> ApiError:
        """Returns the answer to a request for the model."""
        return engine_dead() if self.gave_up else engine_restarting()


def engine_dead() -> ApiError:
    """Returns the answer of an engine that nobody restarts."""
    return ApiError(503, "the engine is dead; restart the server", code="engine_dead")


def engine_restarting() -> ApiError:
    """Returns the answer while an engine is rebuilt."""
    headers = {"Retry-After": str(RETRY_AFTER)}
    text = "the engine has failed and is being rebuilt; try again later"
    return ApiError(503, text, None, "engine_restarting", headers)
