"""Names by which requests call the server: pages of others must not use one without keys."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.server_live import Live, live
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.middleware.hosts import AllowedHosts

PATHS = ("/", "/v1/models", "/health", "/metrics", "/docs", "/openapi.json", "/nothing")


def ask(server: Live, host: str, path: str = "/v1/models", method: str = "GET", **headers: str) -> Any:
    return httpx.request(method, server.base + path, headers={"Host": host, **headers})


@pytest.mark.parametrize("path", PATHS)
def test_a_page_cannot_read_a_server_by_a_domain_of_its_own(server: Live, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        got = ask(server, f"rebound.example:{server.port}", path, method)
        assert got.status_code == 400, got.text
        assert got.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["", "127.0.0.1.example", "localhost.example", "[", "x@evil.example", "10.0.0.1"]
)
def test_names_like_those_of_this_machine_are_refused(server: Live, host: str) -> None:
    assert ask(server, host).status_code == 400


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost.:80", "127.0.0.1", "127.1.2.3:1", "[::1]", "[::1]:8000", "a.localhost:8000"],
)
def test_this_machine_has_several_names(server: Live, host: str) -> None:
    assert ask(server, host).status_code == 200


def test_pages_of_others_cannot_send_requests(server: Live) -> None:
    def post(origin: str, **more: str) -> int:
        body = '{"prompt": "a", "max_tokens": 1}'
        headers = {"Origin": origin, "Content-Type": "application/json", **more}
        return httpx.post(server.base + "/v1/completions", content=body, headers=headers).status_code

    for origin in (
        "https://evil.example",
        "http://evil.example:8000",
        "null",
        "https://localhost.evil.example",
    ):
        assert post(origin) == 403
    for origin in (server.base, "http://localhost:3000", "vscode-webview://a", "chrome-extension://b"):
        assert post(origin) == 200


def test_operators_allow_names(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, allowed_hosts=("llm.example", "*.internal.example"), api_keys=("k",)) as server:
        key = {"Authorization": "Bearer k"}
        for host in ("llm.example:443", "LLM.example.", "a.internal.example", "localhost"):
            assert ask(server, host, **key).status_code == 200, host
        for host in ("other.example", "internal.example", "xinternal.example"):
            assert ask(server, host, **key).status_code == 400, host
        assert ask(server, "llm.example", Origin="https://page.example", **key).status_code == 200
    with live(tiny_llm, allowed_hosts=("*",)) as server:
        assert ask(server, "any.example").status_code == 200


def test_servers_with_keys_and_behind_proxies_take_any_name(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("k",)) as server:
        assert ask(server, "llm.example", Authorization="Bearer k").status_code == 200
    for listens, has_keys, checks in (
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("192.168.1.2", False, False),
        ("127.0.0.1", True, False),
        ("127.0.0.1", False, True),
        ("127.0.1.1", False, True),
        ("::1", False, True),
        ("::ffff:127.0.0.1", False, True),
    ):
        allowed = AllowedHosts((), "myhost", has_keys, ())
        allowed.listen(listens)
        assert allowed._checks == checks, listens
        assert allowed._allows("myhost") and not allowed._allows("llm.example")


def test_allowed_origins_are_allowed(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, allowed_origins=("https://page.example",)) as server:
        got = ask(server, "127.0.0.1", Origin="https://page.example")
        assert got.status_code == 200
        assert got.headers["access-control-allow-origin"] == "https://page.example"
        assert ask(server, "127.0.0.1", Origin="https://evil.example").status_code == 403
