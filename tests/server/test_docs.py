"""The page of the API and its schema: all routes, descriptions of fields, and no files of other hosts."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.support.server_live import Live, live
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.protocol.descriptions import attribute_texts
from torch_armllm.server.routes import docs


def test_page_loads_its_files_from_the_server(server: Live) -> None:
    pytest.importorskip("fastapi_offline", reason="needs the extra serve")
    got = httpx.get(f"{server.base}/docs")
    assert (got.status_code, got.headers["content-type"]) == (200, "text/html; charset=utf-8")
    addresses = re.findall(r'(?:src|href)="(.*?)"', got.text)
    assert sorted(addresses) == ["data:,", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css"]
    assert "openapi.json" in got.text and not re.search(r"https?://", got.text)
    policy = got.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    for name, media, part in (
        ("swagger-ui-bundle.js", "text/javascript", "SwaggerUIBundle"),
        ("swagger-ui.css", "text/css", ".swagger-ui"),
    ):
        file = httpx.get(f"{server.base}/docs/{name}")
        assert (file.status_code, file.headers["content-type"]) == (200, f"{media}; charset=utf-8")
        assert part in file.text
    told = httpx.get(f"{server.base}/docs/other.js")
    assert (told.status_code, told.json()["error"]["message"]) == (404, "no such file: other.js")


def test_page_without_its_package(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "is_installed", lambda name: False)
    for path in ("/docs", "/docs/swagger-ui.css"):
        told = httpx.get(server.base + path)
        assert (told.status_code, told.json()["error"]["message"]) == (
            501,
            'this page needs fastapi-offline: pip install "torch_armllm[serve]"; /openapi.json does not',
        )


def test_page_and_schema_need_a_key(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("k",)) as server:
        for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert httpx.get(server.base + path).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert httpx.get(f"{server.base}/openapi.json", headers=key).status_code == 200


def test_schema_describes_routes_and_fields(server: Live) -> None:
    schema = httpx.get(f"{server.base}/openapi.json").json()
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert operation["description"] and len(operation["tags"]) == 1, path
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"], path
    parts = schema["components"]["schemas"]
    assert not any("Attributes:" in part.get("description", "") for part in parts.values())
    fields = parts["ChatRequest"]["properties"]
    for name, text in (
        ("top_p", "samples from the fewest most probable tokens"),
        ("thinking_token_budget", "most tokens of a reasoning"),
        ("parallel_tool_calls", "False to end each output behind its first call."),
        ("model", "a name that `/v1/models` lists"),
    ):
        assert fields[name]["description"].startswith(text)
    assert parts["StructuredOutputs"]["properties"]["json"]["description"].startswith("a JSON schema")
    assert parts["LoadRequest"]["properties"]["max_memory"]["description"].startswith("bytes for weights")
    error = parts["ErrorBody"]["properties"]["error"]["$ref"].rpartition("/")[2]
    assert set(parts[error]["properties"]) == {"message", "type", "param", "code"}


def test_attributes_of_a_docstring() -> None:
    class Documented:
        """A thing.

        Attributes:
            a: the first,
                in two lines: here.
            b: the second.

        Raises:
            ValueError: c: never.
        """

    assert attribute_texts(Documented) == {"a": "the first, in two lines: here.", "b": "the second."}
    assert attribute_texts(object) == {}
