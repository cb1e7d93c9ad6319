"""The place of a served model's engine, which another one takes after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.errors import ApiError


class EngineSlot:
    """Holds the engine of a served model; requests wait here for the one that follows it.

    Args:
        llm: the first engine.

    Attributes:
        gave_up: true once no engine will follow one that has failed.
        llm: the engine; None: it was taken down, and none has followed yet.
        number: of the engine, counted from 0.
        unused: set while no request is in the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm: AsyncLLM | None = llm
        self.number = 0
        self.gave_up = False
        self.unused = asyncio.Event()
        self.unused.set()
        self._users = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Counts a request that is in the engine."""
        self._users += 1
        self.unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self.unused.set()

    def clear(self) -> None:
        """Lets go of an engine, so that its memory can be freed."""
        self.llm = None

    def put(self, llm: AsyncLLM) -> None:
        """Lets an engine follow; requests that waited for it go on."""
        self.llm = llm
        self.number += 1
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    async def follower(self, number: int, request_id: str) -> None:
        """Waits for the engine that follows that of a number.

        Raises:
            ApiError: the request was ended; see `end`.
        """
        while self.number == number:
            self._waiting[request_id] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[request_id]
            finally:
                del self._waiting[request_id]

    def end(self, reason: ApiError, request_id: str | None = None) -> None:
        """Ends a request that waits, or all that do."""
        for name, waiting in self._waiting.items():
            if request_id in (None, name) and not waiting.done():
                waiting.set_exception(reason)
