"""Comparison of keys, and answers to web pages of other origins."""

from __future__ import annotations

import hmac
from typing import Any

import httpx
import pytest

from tests.support.server_live import live
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.middleware import auth

PAGE = "https://page.example"


def test_each_key_is_compared_in_the_same_time(tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    class Watched:
        compare_digest = staticmethod(watched)

    monkeypatch.setattr(auth, "hmac", Watched)
    keys = ("a", "b" * 1000, "c")
    with live(tiny_llm, api_keys=keys) as server:
        for key, status in (("a", 200), ("c", 200), ("b" * 1000, 200), ("y", 401), ("x" * 5000, 401)):
            compared.clear()
            got = httpx.get(f"{server.base}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert got.status_code == status
            # all keys are compared, also after one has matched, and by digests of one length
            assert compared == [(32, 32)] * len(keys)


def ask(base: str, origin: str, method: str = "GET", **headers: str) -> httpx.Response:
    return httpx.request(method, f"{base}/v1/models", headers={"Origin": origin, **headers})


def allowed(response: httpx.Response) -> str | None:
    found: str | None = response.headers.get("access-control-allow-origin")
    return found


def test_no_page_may_use_a_server_without_allowed_origins(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm) as server:
        for origin in (PAGE, "null", server.base):
            assert allowed(ask(server.base, origin)) is None
            preflight = ask(server.base, origin, "OPTIONS", **{"Access-Control-Request-Method": "POST"})
            assert preflight.status_code >= 400 and allowed(preflight) is None


def test_only_allowed_origins_may_use_a_server(tiny_llm: AsyncLLM) -> None:
    settings: dict[str, Any] = {"allowed_origins": (PAGE,), "api_keys": ("key",)}
    with live(tiny_llm, **settings) as server:
        for origin, expected in (
            (PAGE, PAGE),
            ("https://page.example.other", None),
            ("http://page.example", None),
            ("https://page.example:444", None),
            ("null", None),
        ):
            answer = ask(server.base, origin, Authorization="Bearer key")
            assert answer.status_code == 200 and allowed(answer) == expected
            assert allowed(ask(server.base, origin)) == expected  # a page reads why it was refused
            preflight = ask(
                server.base,
                origin,
                "OPTIONS",
                **{
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization",
                },
            )
            assert (preflight.status_code == 200) == (expected is not None)
            assert allowed(preflight) == expected
            assert "access-control-allow-credentials" not in preflight.headers  # keys, no cookies
        other = ask(server.base, PAGE, "OPTIONS", **{"Access-Control-Request-Method": "DELETE"})
        assert other.status_code == 400
