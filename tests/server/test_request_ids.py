"""The id of a request in the headers of its response and in the log."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.server_live import NAME, Live, live
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.served_model import ServedModel


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, 200),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, 400),
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404),
        ("/nothing", {}, 404),
    ],
)
def test_every_answer_has_an_id(server: Live, path: str, body: dict[str, Any], status: int) -> None:
    url = f"{server.base}{path}"
    first, second = (httpx.post(url, json=body) for _ in range(2))
    assert first.status_code == status
    assert first.headers["x-request-id"].startswith("req_")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert int(first.headers["openai-processing-ms"]) >= 0
    own = httpx.post(url, json=body, headers={"X-Request-ID": "mine-1"})
    assert own.headers.get_list("x-request-id") == ["mine-1"]


@pytest.mark.parametrize("given", ["", "a" * 129, "two words", "\xe9"])
def test_odd_ids_are_replaced(server: Live, given: str) -> None:
    answer = httpx.get(f"{server.base}/health", headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.headers["x-request-id"].startswith("req_")


def test_clients_read_it(server: Live) -> None:
    client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    got = client.completions.create(model=NAME, prompt="a", max_tokens=1, extra_headers={"x-request-id": "b"})
    assert got._request_id == "b"
    body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{server.base}/v1/messages", json=body)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]  # Anthropic's name


def test_refusals_and_failures_have_it(
    tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ServedModel, "check_tokens", fail)
    with live(tiny_llm, api_keys=("k",), allowed_origins=("https://a.b",)) as server:
        url, ids = f"{server.base}/v1/completions", {"x-request-id": "mine"}
        refused = httpx.post(url, json={}, headers=ids)
        caplog.set_level(logging.DEBUG, "torch_armllm.server")
        allowed = {**ids, "authorization": "Bearer k", "origin": "https://a.b"}
        failed = httpx.post(url, json={"model": NAME, "prompt": [1]}, headers=allowed)
        shown = httpx.get(f"{server.base}/v1/models", headers=allowed)
    assert [refused.status_code, failed.status_code, shown.status_code] == [401, 500, 200]
    assert all(each.headers["x-request-id"] == "mine" for each in (refused, failed, shown))
    assert "x-request-id" in shown.headers["access-control-expose-headers"].lower()
    assert "the request mine failed" in caplog.text
    assert "x-request-id mine: GET '/v1/models': 200" in caplog.text
