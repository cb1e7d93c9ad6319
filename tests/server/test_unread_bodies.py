"""Early responses to clients that still send."""

from __future__ import annotations

import http.client
import socket
import time

import pytest

from tests.support.server_live import Live, live
from torch_armllm.llm.async_llm import AsyncLLM

CHAT = "/v1/chat/completions"
SIZE = 30_000_000
"""Bytes of a body: more than the buffers of both sockets."""


def connect(server: Live) -> socket.socket:
    host, _, port = server.base.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def header(*lines: str) -> bytes:
    return "\r\n".join((f"POST {CHAT} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


def response(connection: socket.socket) -> tuple[int, str]:
    with http.client.HTTPResponse(connection) as got:
        got.begin()
        return got.status, got.read().decode()


@pytest.mark.parametrize(
    ("settings", "status", "text"),
    [
        ({"max_request_bytes": 1000}, 413, "at most 1000 bytes are accepted"),
        ({"api_keys": ("key",)}, 401, "key"),
    ],
)
def test_clients_that_send_everything_first(
    tiny_llm: AsyncLLM, settings: dict[str, object], status: int, text: str
) -> None:
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    sent = [
        (header(f"Content-Length: {SIZE}"), b" " * SIZE),
        (header("Transfer-Encoding: chunked"), chunk * (SIZE >> 20) + b"0\r\n\r\n"),
    ]
    with live(tiny_llm, **settings) as server:
        for head, body in sent:
            with connect(server) as connection:
                connection.sendall(head)
                connection.sendall(body)
                got, content = response(connection)
                assert got == status and text in content


def test_the_response_comes_before_the_body_ends(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, max_request_bytes=1000) as server, connect(server) as connection:
        connection.sendall(header(f"Content-Length: {SIZE}") + b" " * 5000)
        assert response(connection)[0] == 413
        connection.sendall(b" " * (SIZE - 5000))  # is still read
        assert connection.recv(1) == b""  # then the connection ends


def test_the_rest_is_not_read_forever(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, max_request_bytes=1000, read_timeout=1.0) as server, connect(server) as connection:
        begin = time.monotonic()
        connection.sendall(header(f"Content-Length: {SIZE}"))
        assert response(connection)[0] == 413
        assert connection.recv(1) == b""
        assert time.monotonic() - begin > 0.5


def test_clients_that_wait_before_they_send(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, max_request_bytes=1000) as server, connect(server) as connection:
        connection.sendall(header(f"Content-Length: {SIZE}", "Expect: 100-continue"))
        assert response(connection)[0] == 413
        assert connection.recv(1) == b""
