"""vLLM's fields of requests about tokens: those of the prompt, of the output, and cut prompts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live

PATHS = ("/v1/chat/completions", "/v1/completions")


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    asked = {"prompt": "hello"} if path == PATHS[1] else {"messages": [{"role": "user", "content": "hello"}]}
    more = {"model": NAME, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **asked, **body}
    return httpx.post(f"{server.base}{path}", json=more, timeout=60)


def decoded(server: Live, tokens: list[int]) -> str:
    return str(server.served.prompts.tokenizer.decode(tokens))


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_of_prompt_and_output(server: Live, path: str) -> None:
    got = post(server, path, return_token_ids=True).json()
    (choice,) = got["choices"]
    prompt = (got if path == PATHS[0] else choice)["prompt_token_ids"]
    text = choice["text"] if path == PATHS[1] else choice["message"]["content"]
    assert decoded(server, prompt) == ("hello" if path == PATHS[1] else "<|user|>hello<|assistant|>")
    assert (len(choice["token_ids"]), decoded(server, choice["token_ids"])) == (4, text)
    lines = post(server, path, return_token_ids=True, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    begun = [(c if path == PATHS[0] else c["choices"][0]).get("prompt_token_ids") for c in chunks]
    assert begun == [prompt, *[None] * (len(chunks) - 1)]
    tokens = [token for c in chunks for token in c["choices"][0].get("token_ids", ())]
    assert tokens == choice["token_ids"]
    assert "token_ids" not in post(server, path).text


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_of_the_prompt(server: Live, path: str) -> None:
    got = post(server, path, prompt_logprobs=2, return_token_ids=True).json()
    place = got if path == PATHS[0] else got["choices"][0]
    first, *others = place["prompt_logprobs"]
    tokens = place["prompt_token_ids"]
    assert first is None and len(others) == len(tokens) - 1
    for token, entry in zip(tokens[1:], others, strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3
        assert {1, 2} <= {each["rank"] for each in entry.values()}
        assert entry[str(token)]["decoded_token"] == decoded(server, [token])
        assert all(each["logprob"] <= 0 for each in entry.values())
    own = post(server, path, prompt_logprobs=0).json()
    listed = (own if path == PATHS[0] else own["choices"][0])["prompt_logprobs"]
    assert [list(entry) for entry in listed[1:]] == [[str(token)] for token in tokens[1:]]
    refused = post(server, path, prompt_logprobs=1, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_echoed_logprobs_beside_those_of_the_prompt(server: Live) -> None:
    (choice,) = post(server, PATHS[1], echo=True, logprobs=1, prompt_logprobs=3).json()["choices"]
    assert all(len(entry) >= 3 for entry in choice["prompt_logprobs"][1:])
    assert all(len(entry) <= 2 for entry in choice["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("path", PATHS)
def test_prompts_are_cut_where_asked(server: Live, path: str) -> None:
    whole = "hello" if path == PATHS[1] else "<|user|>hello<|assistant|>"

    def kept(**body: Any) -> str:
        got = post(server, path, return_token_ids=True, **body).json()
        place = got if path == PATHS[0] else got["choices"][0]
        assert got["usage"]["prompt_tokens"] == len(place["prompt_token_ids"])
        return decoded(server, place["prompt_token_ids"])

    assert kept(truncate_prompt_tokens=3) == whole[-3:]
    assert kept(truncate_prompt_tokens=-1) == whole
    most = server.served.max_model_len
    if path == PATHS[1]:
        assert kept(truncate_prompt_tokens=-1, prompt="a" * most + "b") == "a" * (most - 5) + "b"
        assert kept(truncate_prompt_tokens=2, prompt=[5, 6, 7]) == decoded(server, [6, 7])
    for wrong in (0, most, -2):
        refused = post(server, path, truncate_prompt_tokens=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", PATHS)
def test_tokens_as_ids(server: Live, path: str) -> None:
    asked = {"logprobs": 1} if path == PATHS[1] else {"logprobs": True, "top_logprobs": 1}
    got = post(server, path, return_tokens_as_token_ids=True, return_token_ids=True, **asked).json()
    (choice,) = got["choices"]
    found = choice["logprobs"]
    tokens = found["tokens"] if path == PATHS[1] else [each["token"] for each in found["content"]]
    assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]
