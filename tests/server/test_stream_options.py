"""Options of streams, and fields that exclude each other."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["hi", "a longer text"]},
}
MORE = {"max_tokens": 5, "ignore_eos": True, "n": 2, "seed": 1}


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base}{path}", json={"model": NAME, **ASKED.get(path, {}), **body}, timeout=60)


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("path", ASKED)
def test_usage_in_every_chunk(server: Live, path: str) -> None:
    """Each chunk has the usage of its choice so far, and the last one that of the request."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = post(server, path, stream=True, stream_options=options, **MORE)
    assert "x-armllm-warning" not in answer.headers
    *chunks, last = chunks_of(answer)
    counts: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    for chunk in chunks:
        usage, (choice,) = chunk["usage"], chunk["choices"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts.setdefault(choice["index"], []).append(usage["completion_tokens"])
        prompts[choice["index"]] = usage["prompt_tokens"]
        if path.endswith("chat/completions"):
            assert ("role" in choice["delta"]) == (usage["completion_tokens"] == 0)
    assert all(each == sorted(each) and each[-1] == 5 for each in counts.values())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5 * len(counts)
    assert last["usage"]["prompt_tokens"] == sum(prompts.values()) // 2


def test_usage_in_every_chunk_needs_include_usage(server: Live) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": True}):
        answer = post(server, "/v1/completions", stream=True, stream_options=options, max_tokens=2)
        *chunks, last = chunks_of(answer)
        assert not any(chunk.get("usage") for chunk in chunks)
        assert bool(last.get("usage")) == ("include_usage" in options)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, None])
def test_options_of_a_stream_need_one(server: Live, path: str, stream: bool | None) -> None:
    answer = post(server, path, stream=stream, stream_options={"include_usage": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"
    assert post(server, path, stream=stream, stream_options=None, max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_message_is_begun_or_continued(server: Live, path: str) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    more: dict[str, Any] = {"messages": talk, "continue_final_message": True}
    answer = post(server, path, add_generation_prompt=True, **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
    assert post(server, path, **more).status_code == 200
    assert post(server, path, add_generation_prompt=False, **more).status_code == 200


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": {"const": "Rome"}}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "schema": {"const": "Rome"}}}),
        ("/v1/completions", {"response_format": {"type": "json_object", "schema": {"const": "Rome"}}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "schema": {"const": "Rome"}}}}),
    ],
)
def test_schemas_of_json_objects(server: Live, path: str, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    limit = {"max_output_tokens": 30, "input": "hi"} if path == "/v1/responses" else {"max_tokens": 30}
    answer = post(server, path, **form, **limit)
    assert "x-armllm-warning" not in answer.headers
    assert json.dumps("Rome") in json.dumps(answer.json()).replace('\\"', '"')
