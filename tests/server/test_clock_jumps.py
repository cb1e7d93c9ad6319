"""A wall clock that jumps, as it does when a machine gets the time from a network."""

from __future__ import annotations

import itertools
import time

import httpx
import pytest

from tests.support.server_live import NAME, live
from torch_armllm.llm.async_llm import AsyncLLM

_YEAR = 365 * 86400


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wall clock finds another year, before or after the one before."""
    now, turn = time.time(), itertools.count()

    def wall() -> float:
        return now + (-1) ** (number := next(turn)) * number * _YEAR

    monkeypatch.setattr(time, "time", wall)
    monkeypatch.setattr(time, "time_ns", lambda: int(wall() * 1e9))


@pytest.mark.usefixtures("jumping")
def test_requests_limits_and_metrics_do_not_depend_on_the_wall_clock(tiny_llm: AsyncLLM) -> None:
    with live(
        tiny_llm,
        api_keys=("key",),
        request_timeout=60.0,
        max_requests_per_key=4,
        max_tokens_per_minute=10_000,
    ) as server:
        headers = {"Authorization": "Bearer key"}
        with httpx.Client(base_url=server.base, headers=headers, timeout=60) as client:
            asked = {"model": NAME, "prompt": "a b", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            first = client.post("/v1/completions", json=asked)
            for _ in range(8):
                again = client.post("/v1/completions", json=asked)
                assert again.status_code == 200, again.text
                assert again.json()["choices"] == first.json()["choices"]
            streamed = client.post("/v1/completions", json=asked | {"stream": True})
            assert streamed.status_code == 200 and streamed.text.rstrip().endswith("[DONE]")
            assert client.get("/health").status_code == 200
            lines = client.get("/metrics").text.splitlines()
    seconds = [line for line in lines if "_seconds_sum" in line and not line.startswith("#")]
    assert seconds
    for line in seconds:
        assert 0 <= float(line.split()[-1]) < 60, line
