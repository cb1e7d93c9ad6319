"""Signals of the serve command: the first lets requests finish, the second exits at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.server_live import until
from torch_armllm.cli.main import main

pytestmark = pytest.mark.usefixtures("warm_processes")

# Steps that take their time, in a process of its own.
SLOW = """
import sys, time
from torch_armllm.engine.execution.plan_runner import PlanRunner
begin = PlanRunner.begin
def slow(self, step, best=False):
    time.sleep(float(sys.argv[1]))
    return begin(self, step, best)
PlanRunner.begin = slow
from torch_armllm.cli.main import main
sys.exit(main(sys.argv[2:]))
"""

_KEYS = {"Authorization": "Bearer k"}


class Process:
    """A server in a process of its own."""

    def __init__(self, checkpoint: Path, seconds: float, drain_timeout: int = 60) -> None:
        options = ["serve", str(checkpoint), "--port", "0", "--kv-cache-memory", "4MiB", "--api-key", "k"]
        options += ["--drain-timeout", str(drain_timeout)]
        options += ["--speculative-config", "none"]  # a step, and an event, has one token
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(seconds), *options, "--served-model-name", "tiny"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["."] + sys.path)},
        )
        assert self.process.stdout is not None
        self.base = self.process.stdout.readline().split(" at ")[1].strip()
        until(lambda: not self.refuses_connections(), 60)

    def refuses_connections(self) -> bool:
        try:
            httpx.get(self.base.removesuffix("/v1") + "/health")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # it accepted, and then closed its socket
            return False
        return False

    @property
    def num_running(self) -> int:
        metrics = httpx.get(self.base.removesuffix("/v1") + "/metrics", headers=_KEYS).text
        return int(float(re.findall(r"^vllm:num_requests_running{.*} (.*)$", metrics, re.MULTILINE)[0]))

    def post(self, tokens: int) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{self.base}/completions", json=body, headers=_KEYS, timeout=60)

    def ask(self, tokens: int, begun: threading.Semaphore) -> str:
        """Returns the events of a streamed request as text."""
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        text = ""
        with httpx.stream("POST", f"{self.base}/completions", json=body, headers=_KEYS, timeout=60) as got:
            for line in got.iter_lines():
                if not text:
                    begun.release()
                text += line + "\n"
        return text


@pytest.fixture
def process(packed_checkpoint: Path, stored_plans: None, request: pytest.FixtureRequest) -> Iterator[Process]:
    running = Process(packed_checkpoint, *request.param)
    yield running
    running.process.kill()
    running.process.wait()


@pytest.mark.parametrize("process", [(0.05,)], indirect=True)
@pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")
def test_first_signal_lets_requests_finish(process: Process) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(process.ask, 30, begun) for _ in range(8)]
        for _ in asking:
            assert begun.acquire(timeout=60)
        process.process.send_signal(signal.SIGTERM)
        for answer in asking:
            text = answer.result()
            assert text.count("data: ") >= 25
            assert '"finish_reason":"length"' in text
            assert "data: [DONE]" in text
    assert process.process.wait(60) == 0


@pytest.mark.parametrize("process", [(0.05, 1)], indirect=True)
def test_requests_that_do_not_finish_get_an_error(process: Process) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(2) as clients:
        streamed = clients.submit(process.ask, 400, begun)
        assert begun.acquire(timeout=60)
        whole = clients.submit(process.post, 400)
        until(lambda: process.num_running == 2)
        process.process.send_signal(signal.SIGTERM)
        text = streamed.result()
        assert '"code":"exiting"' in text and text.rstrip().endswith("data: [DONE]")
        response = whole.result()
    assert response.status_code == 503 and response.json()["error"]["code"] == "exiting"
    assert response.headers["Retry-After"]
    assert process.process.wait(60) == 0


@pytest.mark.parametrize("process", [(0.5,)], indirect=True)
def test_second_signal_exits_at_once(process: Process) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as clients:
        asking = clients.submit(process.ask, 300, begun)
        assert begun.acquire(timeout=60)
        process.process.send_signal(signal.SIGTERM)
        until(process.refuses_connections)  # two signals that a process has not handled yet count as one
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(60) == 128 + signal.SIGTERM  # the request would take 150 s
        with pytest.raises(httpx.RemoteProtocolError):
            asking.result()


def test_invalid_command_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--max-queue", "0"],
        ["--max-request-bytes", "-1"],
        ["--api-key", ""],
        ["--chat-template", str(tmp_path / "nothing")],
        ["--host", "203.0.113.7"],  # not an address of this machine
    ):
        assert main(["serve", str(tmp_path), *wrong]) == 2
        assert ": error: " in capsys.readouterr().err
