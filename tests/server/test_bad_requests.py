"""Invalid requests: an error in OpenAI's format that names the problem, and the server keeps running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.server_live import NAME, Live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base, timeout=20) as client:
        yield client
    assert server.idle


def error(got: httpx.Response, status: int) -> dict[str, Any]:
    assert got.status_code == status, got.text
    (body,) = got.json().values()
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return dict(body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": }',
        b'\xff\xfe{"messages": []}',
        b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize"])
def test_malformed_requests(http: httpx.Client, path: str, content: bytes) -> None:
    error(http.post(path, content=content, headers=JSON), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_malformed_numbers(http: httpx.Client, number: str) -> None:
    error(http.post(TEXT, content=f'{{"prompt": "a", "temperature": {number}}}', headers=JSON), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_other_content_types(http: httpx.Client, kind: str) -> None:
    error(http.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": kind}), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "wizard", "content": "a"}]),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]),
        ("model", 7),
        ("n", 0),
        ("n", 17),  # more than max_num_seqs
        ("n", 10**30),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 1e300),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -7),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a"] * 1000),
        ("stop", [7]),
        ("stop_token_ids", [10**9]),
        ("allowed_token_ids", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"²": 1}),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", 100),
        ("top_logprobs", 21),
        ("top_logprobs", 2),  # without logprobs
        ("response_format", {"type": "poem"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"grammar": "nonsense"}),
        ("tool_choice", "required"),  # without tools
        ("tools", [{"type": "function", "function": {}}]),
        ("priority", 2**40),
        ("chat_template_kwargs", {"tokenize": True}),
        ("stream", "yes"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_invalid_chat_fields(http: httpx.Client, field: str, value: Any, streamed: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "stream": streamed, field: value}
    error(http.post(CHAT, json=body), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("prompt", [10**6]),
        ("prompt", ["a"] * 3000),
        ("prompt", "a" * 600),  # more than max_model_len
        ("suffix", "a"),
        ("best_of", 0),
        ("best_of", 1000),
        ("logprobs", 100),
        ("echo", "yes"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_invalid_completion_fields(http: httpx.Client, field: str, value: Any, streamed: bool) -> None:
    error(http.post(TEXT, json={"prompt": "a", "max_tokens": 4, "stream": streamed, field: value}), 400)


def test_best_of_cannot_stream(http: httpx.Client) -> None:
    asked = {"prompt": "a", "max_tokens": 4, "n": 2, "best_of": 4, "temperature": 1, "seed": 1}
    assert [choice["index"] for choice in http.post(TEXT, json=asked).json()["choices"]] == [0, 1]
    assert error(http.post(TEXT, json={**asked, "stream": True}), 400)["param"] == "best_of"
    assert "at least n = 2" in error(http.post(TEXT, json={**asked, "best_of": 1}), 400)["message"]


def test_errors_name_the_field(http: httpx.Client) -> None:
    told = error(http.post(CHAT, json={"messages": HELLO, "temperature": "hot"}), 400)
    assert (told["param"], told["type"]) == ("temperature", "invalid_request_error")
    told = error(http.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 600}]}), 400)
    assert "max_model_len" in told["message"]


@pytest.mark.parametrize(
    "body", [{"input": []}, {"input": ""}, {"input": [10**6]}, {"input": "a" * 600}, {"dimensions": 10**6}]
)
def test_invalid_embedding_requests(http: httpx.Client, body: dict[str, Any]) -> None:
    error(http.post("/v1/embeddings", json={"input": "a", **body}), 400)


def test_invalid_token_requests(http: httpx.Client) -> None:
    error(http.post("/detokenize", json={"tokens": [10**6]}), 400)
    error(http.post("/detokenize", json={"tokens": [-1]}), 400)
    error(http.post("/tokenize", json={}), 400)
    error(http.post("/tokenize", json={"prompt": "a", "messages": HELLO}), 400)
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_invalid_unicode(http: httpx.Client) -> None:
    """JSON may contain lone surrogates, which cannot be encoded."""
    for path, body in (
        (TEXT, '{"prompt": "\\ud800", "max_tokens": 1}'),
        (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "stop": "\\ud800", "max_tokens": 1}'),
        (CHAT, '{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'),
        ("/tokenize", '{"prompt": "\\ud800"}'),
        ("/v1/embeddings", '{"input": "\\ud800"}'),
    ):
        got = http.post(path, content=body, headers=JSON)
        assert got.status_code in (200, 400, 404), got.text


def test_deeply_nested_schemas(http: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    got = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "response_format": wanted})
    assert "nested levels of the schema" in error(got, 400)["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": HELLO, "max_tokens": 1, "tools": [tool], "tool_choice": "required"}
    assert "nested levels of the schema" in error(http.post(CHAT, json=body), 400)["message"]


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    error(http.get("/v1/nothing"), 404)
    error(http.get(CHAT), 405)
    error(http.delete("/v1/models"), 405)
    assert error(http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    told = error(http.post(CHAT, json={"model": "other", "messages": HELLO}), 404)
    assert (told["param"], told["code"]) == ("model", "model_not_found")


def test_openai_client_raises_typed_errors(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="a", temperature=-1)


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "store": True,
        "metadata": {"a": "b"},
        "reasoning_effort": "x",
    }
    assert http.post(CHAT, content=json.dumps(body), headers=JSON).status_code == 200
