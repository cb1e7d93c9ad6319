"""Limits on request bodies and on the number of admitted requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_armllm.server.client_limits import ClientLimits
from torch_armllm.server.errors import ApiError

RETRY_AFTER = 2
"""Seconds after which a refused client may try again."""


class BodyLimit:
    """ASGI middleware that refuses request bodies that are too large or arrive too slowly.

    Args:
        app: the application that reads the bodies.
        max_bytes: largest body.
        timeout: seconds from the first byte to the last.
        larger: largest bodies of single paths.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout: float, larger: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._larger = dict(larger or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._larger.get(scope["path"], self._max_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > most:
            await _too_large(most).response()(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        received = 0
        complete = False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - loop.time())
            except asyncio.TimeoutError:
                text = f"the request body did not arrive within {self._timeout:g} seconds"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > most:
                error = _too_large(most)
                raise HTTPException(error.status, error.message, error.headers)
            return message

        await self._app(scope, limited, send)


def _too_large(most: int) -> ApiError:
    text = f"the request body is too large: at most {most} bytes are accepted"
    return ApiError(413, text, headers={"Connection": "close"})


class Admission:
    """Counts the sequences of all admitted requests, and refuses requests when the queue is full.

    Args:
        max_running: sequences that the engine runs at once (``max_num_seqs``).
        max_queued: sequences that may wait in addition.
        clients: limits of each client.

    Attributes:
        max_running: see above.
        num_admitted: sequences of all requests that were admitted and have not ended.
    """

    def __init__(self, max_running: int, max_queued: int, clients: ClientLimits) -> None:
        self.max_running = max_running
        self._limit = max_running + max_queued
        self._clients = clients
        self.num_admitted = 0

    @contextmanager
    def admit(self, sequences: int, at_once: int | None = None) -> Iterator[None]:
        """Admits a request of several sequences for the duration of the block, or none of them.

        Nothing else runs between the check and the count: both are in the event loop's thread.

        Args:
            sequences: of the request: its prompts times the outputs of each.
            at_once: most of them that it gives to the engine at a time, which are all that wait in the queue;
                None: all.

        Raises:
            ApiError: the queue has no room for them, or the client would pass a limit of its own.
        """
        places = sequences if at_once is None else min(sequences, at_once)
        if places > self._limit:
            text = (
                f"this request has {places} sequences, which are prompts times n, and this server takes "
                f"{self._limit} at a time: send fewer prompts, or lower n"
            )
            raise ApiError(400, text, None, "too_many_sequences")
        if self.num_admitted + places > self._limit:
            headers = {"Retry-After": str(RETRY_AFTER)}
            raise ApiError(429, "too many requests are waiting; try again later", None, "queue_full", headers)
        with self._clients.admit(sequences):
            self.num_admitted += places
            try:
                yield
            finally:
                self.num_admitted -= places
