"""Beam search of the server, beside that of `LLM`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live, slowed
from torch_armllm import LLM, AsyncLLM, BeamSearchParams
from torch_armllm.llm.async_llm import RequestAbortedError

ASK = [{"role": "user", "content": "hello"}]


def post(server: Live, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    asked = {"prompt": "hello"} if path == "/v1/completions" else {"messages": ASK}
    more = {"model": NAME, "max_tokens": 4, "use_beam_search": True, "ignore_eos": True, **asked, **body}
    return httpx.post(f"{server.base}{path}", json=more, timeout=60)


@pytest.fixture(scope="module")
def beams(tiny_checkpoint: Path) -> list[list[int]]:
    """Tokens of the best three completions of each of two prompts."""
    llm = LLM(str(tiny_checkpoint), kv_cache_memory=4 << 20, progress=False)
    params = BeamSearchParams(3, max_tokens=4, ignore_eos=True)
    prompt = llm.get_tokenizer()("hello")["input_ids"]
    (found,) = llm.beam_search([prompt], params)
    return [beam.tokens[len(prompt) :] for beam in found.sequences]


def test_beams_of_completions(server: Live, beams: list[list[int]]) -> None:
    got = post(server, n=3, logprobs=1, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in got["choices"]] == beams
    decode = server.served.prompts.tokenizer.decode
    assert [choice["text"] for choice in got["choices"]] == [decode(tokens) for tokens in beams]
    assert {choice["finish_reason"] for choice in got["choices"]} == {"length"}
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in got["choices"]]
    assert sums == sorted(sums, reverse=True)
    assert got["usage"]["completion_tokens"] == 12
    best = post(server, n=1, best_of=3, return_token_ids=True).json()["choices"]
    assert [choice["token_ids"] for choice in best] == beams[:1]
    assert best[0]["logprobs"] is None
    assert server.idle


def test_beams_of_conversations_and_streams(server: Live) -> None:
    whole = post(server, "/v1/chat/completions", n=2, return_token_ids=True).json()["choices"]
    assert len({tuple(choice["token_ids"]) for choice in whole}) == 2
    streamed = post(server, n=2, stream=True)
    assert streamed.text.count('"finish_reason":"length"') == 2
    short = post(
        server, prompt="a" * (server.served.max_model_len - 2), max_tokens=None, n=2, best_of=2
    ).json()
    assert short["usage"]["completion_tokens"] == 2 * 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "a"}, "stop"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_fields_without_meaning_are_refused(server: Live, body: dict[str, Any], field: str) -> None:
    answer = post(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert post(server, temperature=0, top_p=1.0, seed=3, length_penalty=0.5).status_code == 200


def test_aborted_searches_end(tiny_llm: AsyncLLM) -> None:
    async def search() -> None:
        params = BeamSearchParams(2, max_tokens=200, ignore_eos=True)
        with slowed(tiny_llm, 0.001):
            searching = asyncio.ensure_future(anext(tiny_llm.beam_search("a", "one", params)))
            await asyncio.sleep(0.05)
            await tiny_llm.abort("one")
            with pytest.raises(RequestAbortedError):
                await searching
        with pytest.raises(ValueError, match="needs params"):
            await anext(tiny_llm.beam_search("a"))

    asyncio.run(search())
