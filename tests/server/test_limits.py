"""Limits: API keys, body sizes, queue, timeouts, origins and connections."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.server_live import NAME, Live, live, slowed, until
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.run import allow_many_connections

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
LONG = {**HELLO, "max_tokens": 400, "ignore_eos": True}


def post(server: Live, body: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(f"{server.base}{CHAT}", json=body, timeout=30, **more)


def test_api_keys(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("first", "sécond")) as server:
        for key in ("first", "sécond"):
            got = post(server, HELLO, headers={"Authorization": f"Bearer {key}".encode()})
            assert got.status_code == 200, got.text
        for wrong in ("", "Bearer", "Bearer firs", "Bearer firstx", "Basic first", "first", "Bearer \xff"):
            got = post(server, HELLO, headers={"Authorization": wrong.encode("latin1")})
            assert got.status_code == 401, wrong
            assert got.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing", "/health/"):
            assert httpx.get(server.base + path).status_code == 401, path
        assert httpx.get(server.base + "/health").status_code == 200


def test_too_large_bodies(tiny_llm: AsyncLLM) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b" " * 100

    with live(tiny_llm, max_request_bytes=1000) as server:
        for content in (b" " * 1001, pieces()):
            got = httpx.post(server.base + CHAT, content=content)
            assert got.status_code == 413, got.text
            assert "1000" in got.json()["error"]["message"]
        assert post(server, HELLO).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_too_long_texts_are_refused_before_they_are_tokenized(
    tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    text = "a" * 4_000_000
    fields = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/embeddings": {"input": text},
    }
    tokenizer = type(tiny_llm.get_tokenizer())
    with live(tiny_llm) as server, monkeypatch.context() as patches:
        patches.setattr(tokenizer, "__call__", lambda *args, **options: pytest.fail("it was tokenized"))
        got = httpx.post(server.base + path, json={"model": NAME, **fields.get(path, {"prompt": text})})
    assert got.status_code == 400, got.text
    assert "has 4000000 characters" in got.json()["error"]["message"]


def test_embedding_dimensions_are_checked_before_the_model_is_loaded(
    tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tiny_llm) as server, monkeypatch.context() as patches:
        patches.setattr(AsyncLLM, "model", property(lambda self: pytest.fail("the model was loaded")))
        body = {"model": NAME, "input": "hello", "dimensions": 10**6}
        got = httpx.post(server.base + "/v1/embeddings", json=body)
    assert got.status_code == 400, got.text
    assert "dimensions is 1000000; the model's embeddings have" in got.json()["error"]["message"]


def test_full_queue(tiny_llm: AsyncLLM) -> None:
    seats, all_came = 16, threading.Event()
    with live(tiny_llm, max_queue=1) as server, slowed(tiny_llm, 0, all_came.is_set):
        with ThreadPoolExecutor(24) as clients:
            asked = [clients.submit(post, server, HELLO) for _ in range(24)]
            until(lambda: sum(answer.done() for answer in asked) == 24 - seats - 1)
            all_came.set()
            got = [answer.result() for answer in asked]
        refused = [answer for answer in got if answer.status_code == 429]
        assert len(refused) == 24 - seats - 1
        assert sum(answer.status_code == 200 for answer in got) == seats + 1
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert server.idle
        assert post(server, HELLO).status_code == 200


def test_urgent_requests_run_first(tiny_llm: AsyncLLM) -> None:
    ended: list[str] = []

    def ask(server: Live, name: str, **more: Any) -> None:
        assert post(server, {**HELLO, **more}).status_code == 200
        ended.append(name)

    go_on = threading.Event()

    def may_step() -> bool:
        """Lets the first requests take all seats at once, and then wait for the others."""
        gauges = tiny_llm.llm_engine.stats.gauges()
        return go_on.is_set() or (gauges.running, gauges.waiting) == (0, 16)

    with (
        live(tiny_llm) as server,
        slowed(tiny_llm, 0.02, may_step),
        ThreadPoolExecutor(18) as clients,
    ):
        asked = [clients.submit(ask, server, "first", max_tokens=60, ignore_eos=True) for _ in range(16)]
        until(lambda: server.served.admission.num_admitted == 16)
        asked.append(clients.submit(ask, server, "later", priority=1, max_tokens=60, ignore_eos=True))
        until(lambda: server.served.admission.num_admitted == 17)
        asked.append(clients.submit(ask, server, "urgent", priority=-1))
        until(lambda: server.served.admission.num_admitted == 18)
        go_on.set()
        for answer in asked:
            answer.result()
    assert ended[0] == "urgent" and ended.index("later") > 8


def test_openai_client_retries_when_the_queue_is_full(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm) as server:
        admission = server.served.admission
        admission.num_admitted += 10**6
        timer = threading.Timer(
            0.5, lambda: setattr(admission, "num_admitted", admission.num_admitted - 10**6)
        )
        timer.start()
        client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=2)
        messages: Any = HELLO["messages"]
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).choices


def test_max_tokens_of_the_server(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, max_tokens=3) as server:
        for body in (LONG, {"messages": HELLO["messages"], "ignore_eos": True}):
            got = post(server, body).json()
            assert got["usage"]["completion_tokens"] == 3
            assert got["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_request_timeout(tiny_llm: AsyncLLM, streamed: bool) -> None:
    with live(tiny_llm, request_timeout=0.5) as server, slowed(tiny_llm, 0.02):
        got = post(server, {**LONG, "stream": streamed})
        if streamed:
            *_, last, done, _ = got.text.split("\n\n")
            assert '"code":"timeout"' in last
            assert done == "data: [DONE]"
        else:
            assert got.status_code == 504
        until(lambda: server.idle)


def connect(server: Live, first: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(10)
    connection.sendall(first)
    return connection


def head(length: int) -> bytes:
    lines = (
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def test_incomplete_requests_time_out(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, read_timeout=1.0) as server:
        silent, begun, half = [connect(server, first) for first in (b"", b"POST /v1", head(50) + b"{")]
        assert half.recv(1 << 16).startswith(b"HTTP/1.1 408")
        assert silent.recv(1) == b""
        assert begun.recv(1) == b""
        for connection in (silent, begun, half):
            connection.close()
        until(lambda: server.connections == 0)


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many_connections()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 5000:
        pytest.skip("the system lets a process open fewer than 5000 files")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_thousands_of_idle_connections(server: Live) -> None:
    idle = [connect(server) for _ in range(2000)]
    until(lambda: server.connections == len(idle))
    assert post(server, HELLO).status_code == 200
    for connection in idle:
        connection.close()
    until(lambda: server.connections == 0)


def test_responses_are_sent_without_delay(server: Live) -> None:
    connection = connect(server)
    until(lambda: server.connections == 1)
    assert server.own_socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    connection.close()
    until(lambda: server.connections == 0)


def test_non_http_connections(server: Live) -> None:
    for noise in (b"\x16\x03\x01\x02\x00" * 50, b"GET\r\n\r\n", b"\0" * 1000):
        connection = connect(server, noise)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")
        connection.close()
    assert post(server, HELLO).status_code == 200


def test_slow_readers_do_not_delay_others(server: Live) -> None:
    body = json.dumps({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    slow = connect(server, head(len(body)) + body)
    assert post(server, HELLO).status_code == 200  # while the slow reader has read nothing
    got = b""
    while b"[DONE]" not in got:
        got += slow.recv(4096)
    slow.close()
    assert got.count(b'"top_logprobs"') >= 300  # of one token each; events may have several
    until(lambda: server.idle)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux's TCP_USER_TIMEOUT")
def test_stalled_readers_are_dropped(tiny_llm: AsyncLLM) -> None:
    """More data is sent than the buffers hold: the connection is dropped and its request aborted."""
    body = {**LONG, "temperature": 1, "n": 16, "stream": True, "logprobs": True, "top_logprobs": 20}
    with live(tiny_llm, write_timeout=1.0) as server:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        stuck.sendall(head(len(content)) + content)
        until(lambda: bool(server.served.admission.num_admitted))
        until(lambda: server.connections == 0)
        until(lambda: server.idle)
        stuck.close()
