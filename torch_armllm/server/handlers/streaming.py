"""Streaming responses as server-sent events, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from torch_armllm.server.errors import ApiError, ClientDisconnected, unexpected
from torch_armllm.system.panics import PANICS_AS_ERRORS

T = TypeVar("T")
Event = dict[str, Any]

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
SILENCE = 15.0
"""Seconds after which a stream in which nothing is sent gets a comment."""


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
    """A response of server-sent events; closes their generator when the client disconnects.

    A comment is sent whenever nothing else was for `SILENCE` seconds: proxies and clients drop connections
    that are silent for longer, and a long prompt or a call in the making may take minutes.

    Args:
        first: the first event, which may not be there yet.
        events: the events that follow it.
        done: True if ``[DONE]`` ends them.
    """

    def __init__(self, first: asyncio.Task[Event], events: AsyncGenerator[Event, None], done: bool) -> None:
        self._first, self._events = first, events
        self._encoded = _encoded(first, events, done)
        self._sent = 0.0  # time of the latest message
        super().__init__(self._encoded, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            async with aclosing(self._encoded):
                with suppress(ClientDisconnected, OSError):
                    await cancel_on_disconnect(receive, self.stream_response(send))
        finally:
            await _end(self._first)
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        """Sends the events, and comments between them."""
        clock = asyncio.get_running_loop().time

        async def timed(message: Message) -> None:
            await send(message)
            self._sent = clock()

        keeper: asyncio.Task[None] | None = None

        async def kept(message: Message) -> None:
            nonlocal keeper
            if message["type"] == "http.response.body" and not message.get("more_body") and keeper:
                await _end(keeper)  # no comment follows the end
            await timed(message)
            if message["type"] == "http.response.start":
                keeper = asyncio.ensure_future(self._keep_alive(timed))

        try:
            await super().stream_response(kept)
        finally:
            if keeper is not None:
                await _end(keeper)

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            rest = self._sent + SILENCE - clock()
            if rest <= 0:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            else:
                await asyncio.sleep(rest)


async def event_stream(
    receive: Receive, events: AsyncGenerator[Event, None], done: bool = True
) -> EventStream:
    """Returns a stream of events that starts with the first event, or without it where that takes long.

    An error before that is raised, and becomes an ordinary error response.

    Args:
        receive: the ASGI receive function.
        events: the events to send; at least one. A ``type`` of theirs becomes their name.
        done: True if ``[DONE]`` ends them.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await cancel_on_disconnect(receive, _wait(first))
        if first.done():
            first.result()
    except BaseException:
        await _end(first)
        await events.aclose()
        raise
    return EventStream(first, events, done)


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await events.__anext__()


async def _wait(first: asyncio.Task[Event]) -> None:
    await asyncio.wait([first], timeout=SILENCE)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _encoded(
    first: asyncio.Task[Event], events: AsyncGenerator[Event, None], done: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            with PANICS_AS_ERRORS:
                yield _encode(await first)
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
