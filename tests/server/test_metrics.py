"""Prometheus metrics, and the dashboard's use of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_live import NAME, Live, live
from torch_armllm.llm.async_llm import AsyncLLM

BOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def numbers(server: Live) -> dict[str, float]:
    page = httpx.get(f"{server.base}/metrics").text
    families = text_string_to_metric_families(page)
    samples = [s for family in families for s in family.samples if "endpoint" not in s.labels]
    assert all(s.labels["model_name"] == NAME for s in samples)
    return {s.name + s.labels.get("finished_reason", ""): s.value for s in samples if "le" not in s.labels}


@pytest.mark.parametrize("streamed", [False, True])
def test_request_metrics(tiny_llm: AsyncLLM, streamed: bool) -> None:
    with live(tiny_llm) as server:
        before = numbers(server)
        body = {"prompt": "abc" * 20, "max_tokens": 7, "ignore_eos": True, "stream": streamed}
        assert httpx.post(f"{server.base}/v1/completions", json=body).status_code == 200
        after = numbers(server)
    new = {name: value - before.get(name, 0) for name, value in after.items()}
    assert new["vllm:generation_tokens_total"] == 7
    assert new["vllm:request_success_totallength"] == 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert new[f"vllm:{name}_count"] == 1, name
        assert new[f"vllm:{name}_sum"] >= 0
    assert new["vllm:request_prompt_tokens_sum"] == 60
    assert new["vllm:request_generation_tokens_sum"] == 7
    assert (new["vllm:inter_token_latency_seconds_count"] > 0) == streamed
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    computed = new["vllm:prompt_tokens_total"] + new["vllm:prefix_cache_hits_total"]
    assert computed == new["vllm:prefix_cache_queries_total"] == 60


def test_dashboard_uses_existing_metrics(tiny_llm: AsyncLLM) -> None:
    if not BOARD.exists():
        pytest.skip("needs a checkout")
    asked = set(re.findall(r"vllm:\w+", json.dumps(json.loads(BOARD.read_text()))))
    assert len(asked) > 10
    with live(tiny_llm) as server:
        httpx.post(f"{server.base}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        page = httpx.get(f"{server.base}/metrics").text
    assert [name for name in asked if f"{name}{{" not in page] == []
