"""The serving benchmark with our own server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.server_live import NAME, live
from torch_armllm.cli.main import main
from torch_armllm.llm.async_llm import AsyncLLM


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_token_is_counted(
    tiny_llm: AsyncLLM, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(tiny_llm, api_keys=("sécret",)) as server:
        command = ["bench", "serve", "--base-url", f"{server.base}/v1", "--endpoint", endpoint]
        sizes = ["--num-prompts", "6", "--input-len", "5", "--output-len", "8", "--max-concurrency", "3"]
        assert main([*command, *sizes]) == 2
        assert "401" in capsys.readouterr().err
        file = tmp_path / "a.json"
        assert main([*command, *sizes, "--api-key", "sécret", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    (run,) = found["runs"]
    assert found["model"] == NAME
    assert (run["completed"], run["failed"], run["total_output_tokens"]) == (6, 0, 48)
    assert run["total_input_tokens"] >= 6 * 5
    assert run["max_concurrent_requests"] == 3
    assert 0 < run["mean_ttft_ms"] < run["mean_e2el_ms"]
