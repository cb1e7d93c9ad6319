"""A stub server with fixed responses, delays and failures, for tests of the serving benchmark."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FIRST = 0.15
"""Seconds before the first chunk of text."""
GAP = 0.04
"""Seconds between two chunks of text."""
INPUT_TOKENS = 7


class StubServer:
    """Streams ``max_tokens`` chunks of text per request; simulates a failure if the prompt names it.

    Attributes:
        base: URL of the server.
        bodies: bodies of all requests.
        keys: authorization headers of all requests.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.base = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        self.keys.append(headers.get("authorization", ""))
        path = head[0].split()[1]
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/v1/models":
            _send(writer, "200 OK", {"data": [{"id": "first"}, {"id": "second"}]})
        else:
            request = json.loads(body)
            self.bodies.append(request)
            await self._respond(path == "/v1/chat/completions", request, writer)
        await writer.drain()
        writer.close()

    async def _respond(self, chat: bool, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = request["messages"][0]["content"] if chat else request["prompt"]
        if prompt == "refused":
            _send(writer, "400 Bad Request", {"error": {"message": "no such thing"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        writer.write(b": a comment\n\n")
        if chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST)
        for number in range(request["max_tokens"]):
            if number:
                await asyncio.sleep(GAP)
            if prompt == "cut" and number:
                return
            if prompt == "garbled":
                writer.write(b"data: {\n\n")
            if prompt == "error":
                _event(writer, {"error": {"message": "out of memory"}})
            if prompt == "odd":
                _event(writer, {"choices": [7]})
            _event(
                writer,
                {"choices": [{"index": 0, **({"delta": {"content": "x"}} if chat else {"text": "x"})}]},
            )
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if prompt != "uncounted":
            usage = {"prompt_tokens": INPUT_TOKENS, "completion_tokens": request["max_tokens"]}
            _event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: %b\r\n\r\n" % json.dumps(event).encode())


def _send(writer: asyncio.StreamWriter, status: str, body: dict[str, Any]) -> None:
    text = json.dumps(body)
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        f"Connection: close\r\n\r\n{text}".encode()
    )


@contextmanager
def stub_server() -> Iterator[StubServer]:
    """Runs a stub server in a thread."""
    stub = StubServer()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.handle, "127.0.0.1", 0))
    stub.base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield stub
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
