"""Streaming responses as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from torch_armllm.server.errors import ApiError, ClientDisconnected, unexpected
from torch_armllm.system.panics import PANICS_AS_ERRORS

T = TypeVar("T")
Event = dict[str, Any]

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine, and cancels it when the client disconnects.

    Args:
        receive: the ASGI receive function, after the request body was read.
        work: the coroutine.

    Raises:
        ClientDisconnected: the client disconnected first.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([working, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events; closes their generator when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        async with aclosing(self._events):
            with suppress(ClientDisconnected, OSError):
                await cancel_on_disconnect(receive, self.stream_response(send))


async def event_stream(
    receive: Receive, events: AsyncGenerator[Event, None], done: bool = True
) -> EventStream:
    """Returns a stream of events that starts with the first event.

    An error before the first event is raised, and becomes an ordinary error response.

    Args:
        receive: the ASGI receive function.
        events: the events to send; at least one. A ``type`` of theirs becomes their name.
        done: True if ``[DONE]`` ends them.
    """
    first = await cancel_on_disconnect(receive, _next(events))
    return EventStream(_encoded(first, events, done))


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await events.__anext__()


async def _encoded(
    first: Event, events: AsyncGenerator[Event, None], done: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield _encode(first)
        try:
            with PANICS_AS_ERRORS:
                async for event in events:
                    yield _encode(event)
                    await asyncio.sleep(0)  # lets other streams proceed, and notices disconnected clients
        except Exception as error:
            told = (error if isinstance(error, ApiError) else unexpected(error)).to_dict()
            yield _encode(told if done else {**told["error"], **told, "type": "error"})
        if done:
            yield _DONE


def _encode(event: Event) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
    return b"%bdata: %b\n\n" % (name, data)
