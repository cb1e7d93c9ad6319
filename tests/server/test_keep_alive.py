"""Comments in streams in which nothing is sent for a while, and errors after them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live, slowed, until
from torch_armllm.server.handlers import streaming

ASK = [{"role": "user", "content": "a b"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 3},
    "/v1/responses": {"input": "a b", "max_output_tokens": 3},
    "/v1/messages": {"messages": ASK, "max_tokens": 3},
    "/v1/completions": {"prompt": "a b", "max_tokens": 3},
}
COMMENT = ": keep-alive"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE", 0.1)


def lines_of(server: Live, path: str, seconds: float, hold: float, **more: Any) -> tuple[int, list[str]]:
    """Returns status and lines of a stream whose steps take a time, the first of them after another."""
    begin = time.monotonic()
    body = {"model": NAME, "stream": True, **BODIES[path], **more}
    with (
        slowed(server.llm, seconds, lambda: time.monotonic() > begin + hold),
        httpx.stream("POST", server.base + path, json=body, timeout=30) as answer,
    ):
        return answer.status_code, [line for line in answer.iter_lines() if line]


@pytest.mark.parametrize("path", list(BODIES))
def test_silent_streams_get_comments(server: Live, path: str) -> None:
    status, lines = lines_of(server, path, 0.25, 0.4)
    assert status == 200
    assert lines[0] == COMMENT  # before the first token
    last = max(at for at, line in enumerate(lines) if line != COMMENT)
    assert COMMENT in lines[5:last] and last == len(lines) - 1
    assert COMMENT not in lines_of(server, path, 0.0, 0.0)[1]
    until(lambda: server.idle)


def test_an_error_before_anything_is_sent_is_an_ordinary_one(server: Live) -> None:
    path = "/v1/chat/completions"
    long = {"messages": [{"role": "user", "content": "a " * 2000}]}
    status, _ = lines_of(server, path, 0.0, 0.0, **long)
    assert status == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_error_after_a_comment_is_an_event(
    server: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.3)
        raise ValueError("secret")
        yield

    monkeypatch.setattr(server.served, "generate", failing)
    status, lines = lines_of(server, path, 0.0, 0.0)
    assert status == 200 and lines[0] == COMMENT
    (told,) = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert told["error"]["type"] == "server_error" and "secret" not in str(lines)


def test_clients_that_leave_before_the_first_token_end_their_request(server: Live) -> None:
    body = {"model": NAME, "stream": True, **BODIES["/v1/chat/completions"]}
    stop = [False]
    with slowed(server.llm, 0.0, lambda: stop[0]):
        with httpx.stream("POST", server.base + "/v1/chat/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()  # it closes the connection when it is collected
            assert next(lines) == COMMENT
            assert server.served.admission.num_admitted == 1
        until(lambda: not server.served.admission.num_admitted)
        stop[0] = True
        until(lambda: server.idle)
