"""Limits of each client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_live import Live, live, slowed, until
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.client_limits import CLIENT, ClientLimits
from torch_armllm.server.errors import ApiError
from torch_armllm.server.middleware.limits import Admission

PROMPT = {"prompt": "abcd", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def client() -> Iterator[None]:
    token = CLIENT.set(b"a")
    yield
    CLIENT.reset(token)


def _refused(limits: ClientLimits) -> ApiError | None:
    try:
        with limits.admit(1):
            return None
    except ApiError as error:
        return error


def test_sequences_of_a_client_are_limited(client: None) -> None:
    limits = ClientLimits(max_sequences=3)
    with limits.admit(2), limits.admit(1):
        assert (refused := _refused(limits)) is not None
        assert (refused.status, refused.code) == (429, "client_requests")
        CLIENT.set(b"b")
        assert _refused(limits) is None
    CLIENT.set(b"a")
    assert _refused(limits) is None


def test_a_request_is_counted_before_it_is_admitted(client: None) -> None:
    clients = ClientLimits(max_sequences=6)
    queue = Admission(2, 3, clients)
    with queue.admit(3):
        with pytest.raises(ApiError) as full, queue.admit(3):  # five places, six of this client
            pass
        assert (full.value.status, full.value.code) == (429, "queue_full")
        with queue.admit(2):
            assert queue.num_admitted == 5
        with queue.admit(3, at_once=2):
            assert queue.num_admitted == 5
        with pytest.raises(ApiError) as many, queue.admit(4, at_once=2):
            pass
        assert (many.value.status, many.value.code) == (429, "client_requests")
        assert queue.num_admitted == 3
    for sequences, at_once in ((6, None), (7, 2)):
        with pytest.raises(ApiError, match="send fewer prompts") as never, queue.admit(sequences, at_once):
            pass
        assert (never.value.status, never.value.code) == (400, "too_many_sequences")
    assert queue.num_admitted == 0
    with queue.admit(5):
        pass


def test_sequences_are_counted_for_the_client_that_was_admitted(client: None) -> None:
    limits = ClientLimits(max_sequences=1)
    with limits.admit(1):
        CLIENT.set(b"b")
    CLIENT.set(b"a")
    assert _refused(limits) is None


def test_tokens_of_a_client_refill(client: None) -> None:
    clock = Clock()
    limits = ClientLimits(tokens_per_minute=60, clock=clock)
    limits.charge(100)
    assert (refused := _refused(limits)) is not None
    assert refused.code == "client_tokens"
    assert refused.headers == {"Retry-After": "41"}
    CLIENT.set(b"b")
    assert _refused(limits) is None
    CLIENT.set(b"a")
    clock.now = 40.9
    assert _refused(limits) is not None
    clock.now = 41.0
    assert _refused(limits) is None
    clock.now = 1e6
    limits.charge(59)  # no more than a minute's tokens are kept
    assert _refused(limits) is None
    limits.charge(1)
    assert _refused(limits) is not None
    clock.now -= 100.0  # a clock that jumps back gives and takes nothing
    assert _refused(limits) is not None


def _ask(server: Live, key: str, path: str = "completions", body: dict[str, Any] = PROMPT) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.base}/v1/{path}", json=body, headers=headers, timeout=30)


def test_a_key_with_too_many_requests_leaves_the_others_alone(tiny_llm: AsyncLLM) -> None:
    async def both(server: Live) -> None:
        headers = {"Authorization": "Bearer k"}
        async with httpx.AsyncClient(base_url=server.base, headers=headers, timeout=30) as http:
            first = asyncio.create_task(http.post("/v1/completions", json={**PROMPT, "stream": True}))
            await asyncio.to_thread(until, lambda: server.served.admission.num_admitted == 1)
            second = await http.post("/v1/completions", json=PROMPT)
            assert second.status_code == 429
            assert second.json()["error"]["code"] == "client_requests"
            assert "Retry-After" in second.headers
            assert (await asyncio.to_thread(_ask, server, "other")).status_code == 200
            assert (await first).status_code == 200

    with live(tiny_llm, api_keys=("k", "other"), max_requests_per_key=1) as server:
        with slowed(tiny_llm, 0.05):
            asyncio.run(both(server))
        assert _ask(server, "k").status_code == 200


MANY: list[tuple[str, dict[str, Any]]] = [
    ("completions", {**PROMPT, "prompt": ["a"] * 9}),
    ("completions", {**PROMPT, "prompt": ["a"] * 3, "n": 3, "temperature": 1}),
    ("completions", {**PROMPT, "prompt": ["a"] * 3, "best_of": 3, "temperature": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 9}),
    ("embeddings", {"input": ["a"] * 9}),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "body"), MANY)
def test_no_request_takes_the_queue_from_others(
    tiny_llm: AsyncLLM, path: str, body: dict[str, Any], streams: bool
) -> None:
    with live(tiny_llm, api_keys=("k", "other"), max_requests_per_key=8, max_queue=2) as server:
        more = {} if path == "embeddings" or "best_of" in body else {"stream": streams}
        refused = _ask(server, "k", path, {**body, **more})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "too_many_sequences"
        assert _ask(server, "other").status_code == 200
        assert server.idle


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_are_charged_to_their_key(tiny_llm: AsyncLLM, streams: bool) -> None:
    with live(tiny_llm, api_keys=("k", "other"), max_tokens_per_minute=20) as server:
        clock = Clock()
        server.registry._clients._clock = clock
        assert _ask(server, "k", body={**PROMPT, "stream": streams}).status_code == 200  # 10 tokens
        assert _ask(server, "k", "embeddings", {"input": "abcdefghij"}).status_code == 200
        refused = _ask(server, "k")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "client_tokens"
        assert refused.headers["Retry-After"] == "3"
        assert _ask(server, "other").status_code == 200
        clock.now = 3.0
        assert _ask(server, "k").status_code == 200
