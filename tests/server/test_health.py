"""Health of a server with a dead engine."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.server_live import NAME, live
from torch_armllm.llm.async_llm import AsyncLLM

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_dead_engine_is_reported(tiny_checkpoint: Path) -> None:
    llm = AsyncLLM(str(tiny_checkpoint), kv_cache_memory=4 << 20, progress=False)
    with live(llm, api_keys=("k",)) as server:
        keys = {"Authorization": "Bearer k"}
        assert httpx.get(f"{server.base}/health").status_code == 200
        llm.shutdown()
        told = httpx.get(f"{server.base}/health")
        assert told.status_code == 503
        assert NAME in told.json()["error"]["message"]
        asked = httpx.post(f"{server.base}/v1/chat/completions", json=CHAT, headers=keys)
        assert asked.status_code == 503
        assert asked.json()["error"]["code"] == "engine_dead"
        assert not server.served.admission.num_admitted
