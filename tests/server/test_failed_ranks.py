"""Servers whose engine has tensor parallel ranks, of which one fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rank_processes import ended, pids
from tests.support.server_live import NAME, Live, live, until
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.errors import ApiError

pytestmark = pytest.mark.usefixtures("warm_processes")

ENGINE: dict[str, Any] = {
    **{"kv_cache_memory": 4 << 20, "progress": False, "threads": 1},
    "tensor_parallel_size": 2,
}
PROMPT = {"prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def _health(server: Live) -> int:
    return httpx.get(f"{server.base}/health").status_code


def _ask(server: Live) -> httpx.Response:
    return httpx.post(f"{server.base}/v1/completions", json=PROMPT, timeout=60)


def _is_served(server: Live) -> bool:
    try:
        return not server.registry.find(NAME).llm.errored
    except ApiError:
        return False


@pytest.mark.slow
def test_health_is_red_once_a_rank_is_killed(tiny_checkpoint: Path) -> None:
    before = set(pids())
    with live(AsyncLLM(str(tiny_checkpoint), **ENGINE)) as server:
        (process,) = set(pids()) - before
        assert _ask(server).status_code == 200
        assert _health(server) == 200
        os.kill(process, signal.SIGKILL)
        until(lambda: _health(server) == 503, 30)  # no request has to come first
        assert _ask(server).json()["error"]["code"] == "engine_dead"
        assert f"rank 1 has failed: process {process} was ended by signal 9" in str(server.llm.dead_error)


@pytest.mark.slow
def test_a_server_that_restarts_gets_new_ranks(tiny_checkpoint: Path) -> None:
    before = set(pids())
    llm = AsyncLLM(str(tiny_checkpoint), **ENGINE)
    settings: dict[str, Any] = {"engine": ENGINE, "source": str(tiny_checkpoint), "restart": True}
    with live(llm, **settings) as server:
        del llm
        server.llm = None  # type: ignore[assignment]  # the engine is the registry's alone
        (first,) = set(pids()) - before
        placed = os.sched_getaffinity(first)
        expected = _ask(server).json()["choices"][0]["text"]
        os.kill(first, signal.SIGKILL)
        until(lambda: not _is_served(server), 30)
        until(lambda: _is_served(server), 240)
        assert _health(server) == 200
        answer = _ask(server)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, expected)
        assert ended(first)
        (second,) = {p for p in set(pids()) - before if not ended(p, seconds=0)}
        assert os.sched_getaffinity(second) == placed  # the thread that loads has all CPUs back
