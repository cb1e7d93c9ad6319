"""Restarts of engines that have failed."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live, live, slowed, until
from torch_armllm.engine import engine_thread
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.errors import ApiError
from torch_armllm.server.restarts import RETRY_AFTER, RestartLimit
from torch_armllm.server.served_model import ServedModel

ENGINE = {"kv_cache_memory": 4 << 20, "progress": False}
PROMPT = {"prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def restarting(packed_checkpoint: Path, stored_plans: None) -> Iterator[Live]:
    llm = AsyncLLM(str(packed_checkpoint), **ENGINE, max_num_seqs=16)
    starting = live(llm, engine=ENGINE, source=str(packed_checkpoint), restart=True, max_restarts=2)
    del llm  # the engine is the server's alone
    with starting as server:
        yield server


def _fail(served: ServedModel) -> None:
    """Lets the next step of an engine fail in a way that ends the engine."""

    engine: Any = served.llm.llm_engine
    engine.step = _broken_step


def _broken_step() -> Any:
    raise RuntimeError("a failure")


def _restarts(server: Live) -> float:
    return server.registry.metrics.restarts.labels(NAME, "success")._value.get()


def _ask(server: Live) -> httpx.Response:
    return httpx.post(f"{server.base}/v1/completions", json=PROMPT, timeout=30)


def _failing_answer(server: Live) -> httpx.Response:
    _fail(server.registry.find(NAME))
    return _ask(server)


def _is_served(server: Live) -> bool:
    try:
        return server.registry.find(NAME).llm.errored is False
    except ApiError:
        return False


def test_a_failed_engine_is_rebuilt(restarting: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _ask(restarting).json()["choices"][0]["text"]
    load, may_load = restarting.registry.load_llm, threading.Event()
    monkeypatch.setattr(restarting.registry, "load_llm", lambda model: may_load.wait(30) and load(model))
    monkeypatch.setattr(engine_thread.logger, "disabled", True)  # pytest keeps records, which have frames
    engine = weakref.ref(restarting.llm.llm_engine)
    restarting.llm = None  # type: ignore[assignment]  # the engine is the registry's alone
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_failing_answer, restarting)
        until(lambda: not _is_served(restarting), 30)
        for answer in (_ask(restarting), httpx.get(f"{restarting.base}/health")):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_restarting"
            assert answer.headers["Retry-After"] == str(RETRY_AFTER)
        assert not waiting.done()
        until(lambda: gc.collect() < 0 or engine() is None, 30)  # its memory is for the next one
        may_load.set()
        assert waiting.result().json()["choices"][0]["text"] == expected
    until(lambda: _is_served(restarting), 30)
    answer = _ask(restarting)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, expected)
    metrics = httpx.get(f"{restarting.base}/metrics").text
    assert f'armllm:engine_restarts_total{{model_name="{NAME}",outcome="success"}} 1.0' in metrics


def test_an_engine_that_keeps_failing_stays_dead(restarting: Live) -> None:
    for _ in range(2):
        assert _failing_answer(restarting).status_code == 200
        until(lambda: _is_served(restarting), 30)
    assert _failing_answer(restarting).json()["error"]["code"] == "engine_dead"
    until(lambda: _ask(restarting).json()["error"]["code"] == "engine_dead")
    assert httpx.get(f"{restarting.base}/health").status_code == 503


def test_a_request_that_makes_two_engines_fail_is_not_computed_again(
    restarting: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = restarting.registry.load_llm

    def load_failing(model: Any) -> AsyncLLM:
        llm = load(model)
        engine: Any = llm.llm_engine
        engine.step = _broken_step
        return llm

    monkeypatch.setattr(restarting.registry, "load_llm", load_failing)
    assert _failing_answer(restarting).json()["error"]["code"] == "engine_restarting"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}])
def test_running_streams_and_waiting_requests_go_on(restarting: Live, sampling: dict[str, float]) -> None:
    body = {**PROMPT, **sampling, "max_tokens": 60, "logprobs": 1}
    before, served = _restarts(restarting), restarting.registry.find(NAME)
    first: Any = restarting.llm.llm_engine

    def stream(number: int) -> list[dict[str, Any]]:
        events = []
        sent: dict[str, Any] = {**body, "prompt": f"text {number}", "stream": True}
        with httpx.stream("POST", f"{restarting.base}/v1/completions", json=sent, timeout=60) as got:
            for text in got.iter_text():  # lines of httpx end at other characters, too
                events += [json.loads(part)["choices"][0] for part in text.split("data: ") if "{" in part]
                if len(events) > 3:  # of whichever runs: 4 wait until another has ended
                    first.step = _broken_step
        return events

    def all_came() -> bool:  # 16 run, 4 wait
        return served.admission.num_admitted == 20

    with slowed(restarting.llm, 0.05, all_came), ThreadPoolExecutor(20) as pool:
        streams = list(pool.map(stream, range(20)))
    assert _restarts(restarting) == before + 1
    for number, events in enumerate(streams):
        logprobs = [event["logprobs"] for event in events]
        assert sum(len(each["tokens"]) for each in logprobs) == 60
        assert events[-1]["finish_reason"] == "length"
        if sampling["temperature"] == 0:
            whole = httpx.post(
                f"{restarting.base}/v1/completions", json={**body, "prompt": f"text {number}"}
            ).json()["choices"][0]
            assert "".join(event["text"] for event in events) == whole["text"]
            assert sum((each["tokens"] for each in logprobs), []) == whole["logprobs"]["tokens"]


def test_loads_that_fail_are_tried_again(restarting: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    load, errors = restarting.registry.load_llm, [OSError("no such folder")]

    def fail_once(model: Any) -> AsyncLLM:
        if errors:
            raise errors.pop()
        return load(model)

    monkeypatch.setattr(restarting.registry, "load_llm", fail_once)
    _failing_answer(restarting)
    until(lambda: _is_served(restarting), 30)
    assert _ask(restarting).status_code == 200


def test_without_the_option_a_failed_engine_stays_dead(tiny_checkpoint: Path) -> None:
    with live(AsyncLLM(str(tiny_checkpoint), **ENGINE), source=str(tiny_checkpoint)) as server:
        assert _failing_answer(server).json()["error"]["code"] == "engine_dead"
        assert _ask(server).json()["error"]["code"] == "engine_dead"


def test_the_server_exits_while_it_rebuilds(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, exits = threading.Event(), threading.Event()

    def wait(model: Any) -> AsyncLLM:
        loading.set()
        exits.wait(30)
        raise OSError("too late")

    with ThreadPoolExecutor(1) as pool:
        with live(AsyncLLM(str(tiny_checkpoint), **ENGINE), source="-", restart=True) as server:
            monkeypatch.setattr(server.registry, "load_llm", wait)
            waiting = pool.submit(_failing_answer, server)
            assert loading.wait(60)
            threading.Timer(0.2, exits.set).start()
        assert waiting.result().status_code == 503


def test_the_limit_counts_within_a_window() -> None:
    now = 0.0
    limit = RestartLimit(2, 10.0, lambda: now)
    assert [limit.take(), limit.take(), limit.take()] == [True, True, False]
    now = 9.9
    assert not limit.take()
    now = 10.0
    assert limit.take()
