"""Servers with several replicas of a model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.rank_processes import ended
from tests.support.server_live import NAME, Live, live, until
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.llm.replicas.replica_set import ReplicaSet

pytestmark = pytest.mark.usefixtures("warm_processes")

ENGINE: dict[str, Any] = {
    **{"kv_cache_memory": 4 << 20, "progress": False, "threads": 1},
    "data_parallel_size": 2,
}
TEXTS = [f"{number} is a number, and the next one is " for number in range(8)]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[Live]:
    llm = AsyncLLM(str(tiny_checkpoint), **ENGINE)
    with live(llm, engine=ENGINE, source=str(tiny_checkpoint), restart=True) as running:
        yield running
    processes = [replica.pid for replica in _replicas(running).replicas]
    llm.shutdown()
    assert all(map(ended, processes))


@pytest.fixture(scope="module")
def one(tiny_checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny_checkpoint), **{**ENGINE, "data_parallel_size": 1})
    yield llm
    llm.shutdown()


def _replicas(server: Live) -> ReplicaSet:
    assert server.llm.replicas is not None
    return server.llm.replicas


def _stream(base: str, prompt: str, tokens: int = 24, **fields: Any) -> Iterator[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=120) as got:
        for text in got.iter_text():  # lines of httpx end at other characters, too
            for part in text.split("data: "):
                if "{" in part:
                    yield json.loads(part)["choices"][0]


def _text(base: str, prompt: str, **fields: Any) -> str:
    return "".join(event["text"] for event in _stream(base, prompt, **fields))


def _metrics(server: Live) -> str:
    return httpx.get(f"{server.base}/metrics").text


@pytest.mark.slow
def test_answers_are_those_of_one_engine_and_both_replicas_compute(server: Live, one: AsyncLLM) -> None:
    with live(one, NAME) as alone, ThreadPoolExecutor(8) as pool:
        for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
            found = list(pool.map(lambda text, f=fields: _text(server.base, text, **f), TEXTS))
            assert found == [_text(alone.base, text, **fields) for text in TEXTS]
    found = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(_metrics(server))
        for sample in family.samples
        if "engine" in sample.labels
    }
    for engine in "01":
        assert found["vllm:generation_tokens_total", engine] > 24
        assert found["vllm:num_requests_running", engine] == 0


@pytest.mark.slow
def test_turns_of_a_conversation_find_their_blocks(server: Live) -> None:
    for number in range(4):
        said = f"conversation {number}: " + "word " * 20
        for turn in range(3):
            body = {"prompt": said, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            got = httpx.post(f"{server.base}/v1/completions", json=body, timeout=60).json()
            cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or cached >= got["usage"]["prompt_tokens"] // 2
            said += "and then more words "


@pytest.mark.slow
def test_clients_that_leave_and_bad_requests(server: Live) -> None:
    streams = [_stream(server.base, text, tokens=400) for text in TEXTS]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    until(lambda: all(replica.load == 0 for replica in _replicas(server).replicas), 30)
    body = {"prompt": [1] * 600, "max_tokens": 1}
    assert httpx.post(f"{server.base}/v1/completions", json=body).status_code == 400
    got = httpx.post(f"{server.base}/v1/embeddings", json={"input": "a"})
    assert (got.status_code, got.json()["error"]["code"]) == (400, "wrong_kind_of_model")


@pytest.mark.slow
def test_messages_are_answered(server: Live, one: AsyncLLM) -> None:
    assert server.llm.keeps_budgets == one.keeps_budgets
    body = {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    got = httpx.post(f"{server.base}/v1/messages", json=body, timeout=120)
    assert (got.status_code, got.json()["usage"]["output_tokens"]) == (200, 4)


@pytest.mark.slow
def test_requests_of_a_killed_replica_go_on_in_another_and_it_is_started_again(server: Live) -> None:
    expected = [_text(server.base, text, temperature=0, tokens=100) for text in TEXTS]
    replicas = _replicas(server)
    first = replicas.replicas[0].pid
    streams = [_stream(server.base, text, temperature=0, tokens=100) for text in TEXTS]
    found = [next(stream)["text"] for stream in streams]
    os.kill(first, signal.SIGKILL)
    for number, stream in enumerate(streams):
        found[number] += "".join(event["text"] for event in stream)
    assert found == expected
    assert httpx.get(f"{server.base}/health").status_code == 200
    until(lambda: f'engine_restarts_total{{model_name="{NAME}",outcome="success"}} 1.0' in _metrics(server))
    assert [_text(server.base, text, temperature=0, tokens=100) for text in TEXTS] == expected
    assert replicas.replicas[0].pid != first and not replicas.dead


@pytest.mark.slow
def test_without_restarts_the_others_serve_and_health_is_red(tiny_checkpoint: Path) -> None:
    with live(AsyncLLM(str(tiny_checkpoint), **ENGINE)) as server:
        first, second = _replicas(server).replicas
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: httpx.get(f"{server.base}/health").status_code == 503, 30)
        assert "replica 0 has ended" in httpx.get(f"{server.base}/health").json()["error"]["message"]
        assert len(_text(server.base, "a")) > 0
        os.kill(second.pid, signal.SIGKILL)
        assert ended(second.pid)
        until(lambda: len(_replicas(server).dead) == 2, 30)
        body = {"prompt": "a", "max_tokens": 4}
        got = httpx.post(f"{server.base}/v1/completions", json=body, timeout=60)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "engine_dead")
