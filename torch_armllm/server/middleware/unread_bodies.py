"""Responses to requests whose body has not been read to its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnreadBodies:
    """ASGI middleware that reads the rest of a body after an early response, and drops it.

    A connection that is closed while the client still sends is reset, and the client never reads why it was
    refused.  A client that waits for ``100 Continue`` has not begun to send.

    Args:
        app: the application.
        timeout: seconds for which the rest is read.
    """

    def __init__(self, app: ASGIApp, timeout: float) -> None:
        self._app = app
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not _sends_a_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        complete = False

        async def watched() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or not message.get("more_body", False)
            return message

        async def read_rest() -> None:
            while not complete:
                await watched()

        async def lingering(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and not complete:
                # the client has the whole response before the rest of its body is awaited
                await send({**message, "more_body": True})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(read_rest(), self._timeout)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, watched, lingering)


def _sends_a_body(headers: Headers) -> bool:
    if headers.get("expect", "").lower() == "100-continue":
        return False
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
