"""How much clients may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_armllm.server.errors import ApiError

RETRY_AFTER = 2
"""Seconds after which a refused client may try again."""


class BodyLimit:
    """Refuses bodies that are too large or take too long.

    Args:
        app: what reads them.
        most: bytes.
        seconds: from the first byte to the last.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._most:
            await self._too_large().response()(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        read = 0
        whole = False

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except asyncio.TimeoutError:
                text = f"the request did not arrive within {self._seconds:g} seconds"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._most:
                error = self._too_large()
                raise HTTPException(error.status, error.message, error.headers)
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        text = f"a request may have {self._most} bytes at most"
        return ApiError(413, text, headers={"Connection": "close"})


class Admission:
    """Counts the answers that are being made, and refuses more where too many wait.

    Args:
        seats: answers that are made at once.
        queue: answers that may wait.

    Attributes:
        held: answers of all requests that were let in and have not ended.
    """

    def __init__(self, seats: int, queue: int) -> None:
        self._most = seats + queue
        self.held = 0

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Lets a request in for as long as the block lasts.

        Raises:
            ApiError: too many wait.
        """
        if self.held >= self._most:
            headers = {"Retry-After": str(RETRY_AFTER)}
            raise ApiError(429, "too many requests are waiting; try again later", None, "queue_full", headers)
        self.held += answers
        try:
            yield
        finally:
            self.held -= answers
