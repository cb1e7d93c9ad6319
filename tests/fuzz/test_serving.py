"""A few random requests, texts and formats; `make fuzz` runs more."""

from __future__ import annotations

import random

import httpx
import pytest

from tests.fuzz.serving import http, scheduler, text
from tests.fuzz.targets import target_named
from torch_armllm.engine.text.stopping import OutputText


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("scheduler", 25),
        ("text", 600),
        ("grammars", 150),
        ("http", 200),
        ("outputs", 500),
        ("templates", 10),
    ],
)
def test_random_inputs(name: str, seeds: int) -> None:
    if name == "grammars":
        pytest.importorskip("llguidance", reason="llguidance is not installed")
        pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    target = target_named(name)
    for seed in range(seeds):
        target(seed)


def test_missing_block_is_a_finding(one_thread: None) -> None:
    machine = scheduler.Machine(random.Random(0))
    machine.submit(0)
    machine.drain()
    machine.engine.scheduler.blocks.allocate(1)
    with pytest.raises(scheduler.Finding, match="'blocks': 1"):
        machine.check()


def test_wrong_token_is_a_finding(one_thread: None) -> None:
    machine = scheduler.Machine(random.Random(1))
    machine.submit(0)
    machine.drain()
    for request in machine.finished.values():
        request.tokens[0][-1] += 1
    with pytest.raises(scheduler.Finding, match="alone:"):
        machine.check()


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, json={}),
        httpx.Response(400, json={"error": {"message": "no"}}),
        httpx.Response(200, headers={"content-type": "text/event-stream"}, text="data: {}\n\n"),
    ],
)
def test_responses_that_are_findings(response: httpx.Response) -> None:
    response.request = httpx.Request("POST", "http://localhost/v1/completions")
    with pytest.raises(http.Finding):
        http.check(response)


def test_text_that_is_taken_back_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputText, "_held_back", lambda self: 0)

    def run_all() -> None:
        for seed in range(100):
            text.run(seed)

    with pytest.raises(text.Finding, match="was shown"):
        run_all()
