"""Coding agents solve a task with a scripted model: they read a file, edit it and run a command."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.agent_clients import AGENTS, Server
from tests.support.agent_script import Edit, Read, Run, Script, playing
from tests.support.chat_templates import FOLDER, MISSING, template_text
from tests.support.refusing_proxy import refusing_proxy
from tests.support.server_live import NAME, live
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.llm.async_llm import AsyncLLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(not FOLDER.exists(), reason=MISSING),
]
FORMATS = {
    "hermes": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3_xml": "Qwen3-Coder",
    "harmony": "openai-gpt-oss-120b",
    "dsml": "deepseek-ai-DeepSeek-V3.2",
    "pythonic": "LFM2.5-Instruct",
}
"""The chat templates by the format of their calls."""
OLD = 'print("hello")\nx = "<a> & \'b\'"\n'
NEW = 'print("good" + "bye")\nx = "<a> & \'c\' {}"\nprint(x)\n'
PRINTED = "goodbye\n<a> & 'c' {}"
ANSWER = "The file says goodbye now."
TOKENS = 1 << 20
"""The most that a prompt may have: a token is a byte, and agents send up to 200 kB of instructions."""
SECONDS = 300


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Runs a command, and ends it with all that it started when it takes too long."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True, **given
    ) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        return process.returncode, output, errors


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("agent", AGENTS)
def test_agents_solve_a_task(
    agent: str, format: str, tiny_llm: AsyncLLM, agents_folder: Path, tmp_path: Path
) -> None:
    client = AGENTS[agent]
    command = client.install(agents_folder)
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    file = work / "greet.py"
    file.write_text(OLD)
    steps = [Read(str(file)), Edit(str(file), OLD, NEW), Run(f"python3 {file}")]
    template = template_text(f"{FORMATS[format]}.jinja")
    with (
        live(tiny_llm, model={"chat_template": template}) as server,
        refusing_proxy() as (proxies, hosts),
        playing(server, Script(steps, ANSWER)) as script,
    ):
        served = server.served
        served.max_model_len = TOKENS
        served.prompts._limit = PromptLimit(served.prompts.tokenizer, TOKENS)
        used = Server(server.base, NAME)
        for path, text in client.settings(used).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        own = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **proxies}
        code, output, errors = run(
            [*command, *client.arguments(used), "Make greet.py say goodbye, and run it."],
            work,
            {**own, **client.environment(used)},
        )
    said = f"{output}\n{errors}\n{script.outputs}\n{script.results}"
    assert code == 0, said
    assert file.read_text() == NEW, said
    assert ANSWER in output, said
    results = script.results
    assert len(results) == len(steps), said
    assert "hello" in results[0] and PRINTED in results[-1], results
    assert client.asks.issuperset(hosts), "connections to other machines"
