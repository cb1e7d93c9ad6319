"""Popular clients work unchanged."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.server_live import NAME, Live, live, slowed, until
from torch_armllm.llm.async_llm import AsyncLLM


def test_langchain(server: Live) -> None:
    chat_models = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = chat_models.ChatOpenAI(
        base_url=f"{server.base}/v1", api_key="none", model=NAME, max_tokens=8, temperature=0, max_retries=0
    )
    whole = model.invoke("hello")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.content for chunk in model.stream("hello")) == whole.content
    assert [answer.content for answer in model.batch(["hello", "hello"])] == [whole.content] * 2
    vectors = chat_models.OpenAIEmbeddings(
        base_url=f"{server.base}/v1", api_key="none", model=NAME, check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    assert len(vectors) == 2 and vectors[0] != vectors[1]


def test_langchain_tools(server: Live) -> None:
    chat_models = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    pytest.importorskip("llguidance", reason="demanded calls need the extra structured")

    def weather(city: str) -> str:
        """Returns the weather."""
        return city

    model = chat_models.ChatOpenAI(
        base_url=f"{server.base}/v1", api_key="none", model=NAME, max_tokens=99, temperature=0
    )
    letters = {str(token): -100 for token in range(3, 259)} | {
        str(3 + ord(each) - ord("!")): 0 for each in '"}'
    }
    bound = model.bind_tools([weather], tool_choice="weather").bind(logit_bias=letters)
    (call,) = bound.invoke("the weather in Rome?").tool_calls
    assert call["name"] == "weather"
    assert "city" in call["args"]


def test_litellm(server: Live) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    asked: dict[str, Any] = {
        "model": f"openai/{NAME}",
        "api_base": f"{server.base}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 8
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content


def test_curl(server: Live, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    arguments = ["-sSN", f"{server.base}/v1/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([curl, *arguments, "-d", json.dumps(body)], capture_output=True, check=True)
    events = done.stdout.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_open_webui(tiny_llm: AsyncLLM) -> None:
    """Open WebUI lists models with the key, relays streams line by line, and stops by closing them."""
    keys = {"Authorization": "Bearer k"}
    with live(tiny_llm, api_keys=("k",)) as server, slowed(tiny_llm, 0.02):
        models = httpx.get(f"{server.base}/v1/models", headers=keys).json()
        assert [model["id"] for model in models["data"]] == [NAME]
        body = {
            "model": NAME,
            "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 400,
            "ignore_eos": True,
        }

        async def chat() -> list[str]:
            lines: list[str] = []
            async with (
                httpx.AsyncClient() as client,
                client.stream(
                    "POST", f"{server.base}/v1/chat/completions", json=body, headers=keys, timeout=30
                ) as got,
            ):
                assert "text/event-stream" in got.headers["content-type"]
                async for line in got.aiter_lines():
                    lines += [line] if line else []
                    if len(lines) == 5:
                        break  # the user stops it
            return lines

        for line in asyncio.run(chat()):
            assert "choices" in json.loads(line.removeprefix("data: "))
        until(lambda: server.idle)


def test_open_webui_background_requests(server: Live) -> None:
    """Open WebUI requests a title and tags during a chat; the last event holds the token usage."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer None", "X-OpenWebUI-Chat-Id": "1"}
    ask = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "stream": False}

    async def run() -> tuple[httpx.Response, list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=f"{server.base}/v1", headers=headers, timeout=60) as client:
            usage = {"include_usage": True}
            chat = {
                **ask,
                "stream": True,
                "stream_options": usage,
                "max_tokens": 40,
                "logit_bias": {"5": -100},
            }
            chat["tools"] = []
            title = {**ask, "max_completion_tokens": 1000, "keep_alive": "5m", "user": None}
            tags = {**ask, "seed": 42, "stop": ["}"], "reasoning_effort": "low"}
            streamed, *told = await asyncio.gather(
                *(client.post("/chat/completions", content=json.dumps(body)) for body in (chat, title, tags))
            )
            return streamed, told

    streamed, told = asyncio.run(run())
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, done = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
    assert done == "[DONE]"
    last = json.loads(chunks[-1])
    assert last["choices"] == [] and last["usage"]["total_tokens"] > last["usage"]["completion_tokens"] > 0
    for got in told:
        assert got.status_code == 200, got.text
        assert got.headers["content-type"] == "application/json"
        assert isinstance(got.json()["choices"][0]["message"]["content"], str)


@pytest.mark.model
def test_smollm2(smollm2_dir: Path) -> None:
    """Eight concurrent chats with a real model have the same outputs as single chats."""
    llm = AsyncLLM(str(smollm2_dir), kv_cache_memory=64 << 20, progress=False)
    try:
        with live(llm, name="smollm2") as server:
            client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)

            def ask(question: str) -> str:
                got = client.chat.completions.create(
                    model="smollm2",
                    messages=[{"role": "user", "content": question}],
                    max_tokens=12,
                    temperature=0,
                )
                return got.choices[0].message.content or ""

            assert "Paris" in ask("What is the capital of France?")

            async def together(questions: list[str]) -> list[str]:
                return list(await asyncio.gather(*(asyncio.to_thread(ask, q) for q in questions)))

            questions = [f"What is {number} plus one?" for number in range(8)]
            alone = [ask(question) for question in questions]
            assert asyncio.run(together(questions)) == alone
    finally:
        llm.shutdown()
