"""Answers on their way to clients, who may leave at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from torch_armllm.server.errors import ApiError, ClientGone, unexpected

T = TypeVar("T")
Event = dict[str, Any]

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LAST = b"data: [DONE]\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does some work, and drops it when the client goes away.

    Args:
        receive: of ASGI, after the request was read.
        work: for the client.

    Raises:
        ClientGone: it went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; ends what makes them when the client goes away."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        async with aclosing(self._events):
            with suppress(ClientGone, OSError):
                await unless_gone(receive, self.stream_response(send))


async def stream(receive: Receive, events: AsyncGenerator[Event, None]) -> EventStream:
    """A stream of events, begun when the first one is there: what fails before is an ordinary error.

    Args:
        receive: of ASGI.
        events: what is sent; at least one.
    """
    first = await unless_gone(receive, _next(events))
    return EventStream(_encoded(first, events))


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await events.__anext__()


async def _encoded(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield _encode(first)
        try:
            async for event in events:
                yield _encode(event)
                await asyncio.sleep(0)  # where many wait, others have their turn, and who left is noticed
        except ApiError as error:
            yield _encode(error.to_dict())
        except Exception as error:
            yield _encode(unexpected(error).to_dict())
        yield _LAST


def _encode(event: Event) -> bytes:
    return b"data: %b\n\n" % json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(
        errors="replace"
    )
