"""The blocks of the page about adapters run, on a tiny model and its adapters."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.support.adapters import random_adapter
from tests.support.server_live import live
from tests.support.tiny_server import checkpoint
from torch_armllm.cli.engine_options import engine_arguments
from torch_armllm.cli.main import build_parser
from torch_armllm.cli.serve import adapter_folders
from torch_armllm.llm.async_llm import AsyncLLM

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/adapters.md"
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S)


def test_the_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path / "BASE"))
    for number in (1, 2):
        random_adapter(model, tmp_path / f"ADAPTER-{number}", number, 1.0)
    python, serve, load, bench = (match["code"] for match in _BLOCK.finditer(PAGE.read_text()))
    exec(python, {})
    assert len(set(eval(capsys.readouterr().out))) == 3
    assert bench.startswith("python -m bench.lora ")
    options = build_parser().parse_args(shlex.split(serve)[1:])
    adapters = adapter_folders(options, options.model)
    llm = AsyncLLM("BASE", progress=False, **engine_arguments(options))
    with live(llm, "BASE", model={"adapters": adapters}, admin_api_key=options.admin_api_key) as server:
        script = load.replace("http://127.0.0.1:8000", server.base).replace("curl ", "curl -sSf ")
        answers = subprocess.run(
            ["bash", "-ec", script], capture_output=True, text=True, check=True, env=os.environ
        ).stdout
        assert '"parent":"BASE"' in answers and '"deleted":true' in answers
        listed = httpx.get(f"{server.base}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["BASE", "poems"]
