"""Panics of a tokenizer: an error for the client whose text it is, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Regex, decoders, pre_tokenizers

from tests.support.models import tiny
from tests.support.server_live import NAME, Live, live
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, SamplingParams
from torch_armllm.llm.async_llm import AsyncLLM

BAD = "a" * 16 + "b"
"""The pattern of `folder` goes back and forth in it, until it gives up."""
PATTERN = "(?:a|a|a|a|a|a)+$"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backtracking")
    saved = tokenizer()
    backend = saved.backend_tokenizer
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Replace(Regex(PATTERN), "c")])
    tiny("llama", vocab_size=len(saved), max_position_embeddings=128).save_pretrained(path)
    saved.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(folder), kv_cache_memory=1 << 20, max_num_seqs=4, progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Live]:
    with live(llm) as running:
        yield running


CHAT = {"messages": [{"role": "user", "content": BAD}], "max_tokens": 2}
ROUTES = [
    ("/v1/completions", {"prompt": "hello", "bad_words": [BAD], "max_tokens": 2}),
    ("/v1/completions", {"prompt": BAD, "max_tokens": 2}),
    ("/v1/completions", {"prompt": BAD, "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/responses", {"input": BAD, "max_output_tokens": 2}),
    ("/v1/embeddings", {"input": BAD}),
    ("/tokenize", {"prompt": BAD}),
    ("/detokenize", {"tokens": [259 - 256 + ord("a") - 33] * 16 + [259 - 256 + ord("b") - 33]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_client_hears_of_a_panic_and_others_are_served(
    server: Live, path: str, body: dict[str, Any]
) -> None:
    got = httpx.post(server.base + path, json={"model": NAME, **body}, timeout=20)
    assert got.status_code == 400, got.text
    assert "retry-limit-in-match" in got.json()["error"]["message"]
    good = httpx.post(server.base + "/v1/completions", json={"model": NAME, "prompt": "hi", "max_tokens": 2})
    assert good.status_code == 200, good.text
    assert server.idle


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": "x"}])
def test_a_panic_over_an_output_ends_that_request_alone(
    server: Live, stream: bool, more: dict[str, Any]
) -> None:
    ids = server.llm.get_tokenizer().convert_tokens_to_ids(["a", "b"])
    lasting = {"prompt": "hello", "max_tokens": 100, "logit_bias": {str(ids[1]): 100}, "temperature": 0}
    with httpx.stream(
        "POST", server.base + "/v1/completions", json={**lasting, "model": NAME, "stream": True}, timeout=20
    ) as other:
        lines = other.iter_lines()
        next(lines)
        body = {"model": NAME, "prompt": [*([ids[0]] * 16)], "max_tokens": 2, "stream": stream, **more}
        body |= {"logit_bias": {str(ids[1]): 100}, "temperature": 0}
        got = httpx.post(server.base + "/v1/completions", json=body, timeout=20)
        assert "retry-limit-in-match" in got.text
        assert got.status_code == 400, got.text
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert server.idle


def test_calls_raise_an_ordinary_error(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_memory=1 << 20, progress=False)
    few = SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match="retry-limit-in-match"):
        llm.generate(BAD, few)
    with pytest.raises(ValueError, match="retry-limit-in-match"):
        llm.generate("hello", SamplingParams(max_tokens=2, bad_words=[BAD]))
    assert llm.generate("hello", few)[0].outputs[0].token_ids
