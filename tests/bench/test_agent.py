"""The benchmark of an agent's conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import agent, agent_server
from bench.agent_conversation import TEMPLATE, instructions, requests, tools
from bench.case import run
from tests.support.models import tiny
from tests.support.server_live import live
from tests.support.tiny_server import tokenizer
from torch_armllm.llm.async_llm import AsyncLLM

_PEER = """\
#!{python}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {{"prompt_tokens": 100 * len(asked["messages"])}}
        self.send_response(200)
        self.end_headers()
        for event in (
            {{"choices": [{{"delta": {{"role": "assistant"}}}}]}},
            {{"choices": [{{"delta": {{"content": "x"}}}}]}},
            {{"choices": [], "usage": usage, "timings": {{"cache_n": 7}}}},
        ):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_instructions_have_the_length_that_is_asked_for() -> None:
    def count(text: str) -> int:
        return len(text.split())

    assert instructions(0, count) == ""
    assert 1000 <= count(instructions(1000, count)) < 1050
    assert instructions(1000, count).startswith(instructions(500, count))


def test_a_turn_has_a_request_after_the_message_and_one_after_the_result() -> None:
    found = list(requests("Be brief.", 2))
    assert [(each.turn, each.last, len(each.messages)) for each in found] == [
        (1, "user", 2),
        (1, "tool", 4),
        (2, "user", 6),
        (2, "tool", 8),
    ]
    names = {tool["function"]["name"] for tool in tools()}
    calls = [call for message in found[-1].messages for call in message.get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} <= names
    assert not any("reasoning_content" in m for each in requests("", 2, False) for m in each.messages)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.thorough), "qwen3_5_moe_text"])
def test_all_that_a_cache_can_hold_is_hit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tokenizer()
    own.chat_template = TEMPLATE
    tiny(family, vocab_size=len(own), max_position_embeddings=8192).save_pretrained(tmp_path / "tiny")
    own.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(agent, "tools", lambda: tools()[:1])

    @contextmanager
    def server(folder: str, options: Sequence[str]) -> Iterator[int]:
        llm = AsyncLLM(folder, quantization="int4", progress=False, disable_log_stats=True, max_num_seqs=8)
        with live(llm) as running:
            yield running.port
        llm.shutdown()

    monkeypatch.setattr(agent_server, "own_server", server)
    binary = tmp_path / "llama-server"
    binary.write_text(_PEER.format(python=sys.executable))
    binary.chmod(0o755)
    options = ["--turns", "2", "--instructions", "1200", "--answer", "2"]
    peer = ["--peer", "llama.cpp", "--binary", str(binary), "--gguf", str(binary)]
    run(agent.agent, ["--model", str(tmp_path / "tiny"), *options, *peer])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ours = [_shares(line) for line in lines if line[2:3] == ["ours"]]
    theirs = [line for line in lines if line[2:3] == ["llama.cpp"]]
    assert [line[3] for line in theirs] == ["200", "400", "600", "800"] and theirs[0][5] == "3.5%"
    assert len(ours) == 4 and ours[0][1:] == (0, 0)
    for prompt, known, hit in ours[1:]:
        assert known > 0.5
        assert known - 40 / prompt < hit <= known + 0.001  # but for the last block
    assert [line[:4] for line in lines[-2:]] == [
        ["all", "after", "1", name] for name in ("ours", "llama.cpp")
    ]


def _shares(line: list[str]) -> tuple[int, float, float]:
    return int(line[3]), float(line[4].rstrip("%")) / 100, float(line[5].rstrip("%")) / 100


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(["--peer", "llama.cpp"], "--binary"), (["--peer", "llama.cpp", "--shape", "hybrid"], "--gguf")],
)
def test_a_peer_needs_its_files(options: list[str], wanted: str) -> None:
    with pytest.raises(SystemExit, match=wanted):
        run(agent.agent, options)


def test_refusals_and_servers_that_do_not_start_are_told(tmp_path: Path) -> None:
    binary: Any = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    with pytest.raises(RuntimeError, match="status 3"), agent_server.llama_server(binary, binary, ()):
        pass
