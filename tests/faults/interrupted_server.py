"""Ends servers under load at random moments, and starts the next on the same port.

    python -m tests.faults.interrupted_server [--rounds 50] [--seed 0]

Each round starts ``torch-armllm serve`` with a tiny model and sends requests from several threads.  SIGKILL,
SIGTERM or SIGINT arrives at a random moment, some while the server starts.  After SIGTERM and SIGINT the
server exits with status 0, and each response that it has begun is complete.  All complete responses hold the
tokens that the first server computed.  Prints a JSON line of counts.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.faults.forked import exit_code, fork
from tests.support.tiny_server import checkpoint
from torch_armllm.cli.main import main as command
from torch_armllm.server import run as _imported  # noqa: F401  # before processes are forked

_CLIENTS = 4
_PROMPTS = ["hello", "the sea " * 8, "a", "long way home"]
_STARTED = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (0,), signal.SIGINT: (0,)}
"""Exit statuses by signal, of a server that has started."""
_STARTING = {
    signal.SIGKILL: (-signal.SIGKILL,),
    signal.SIGTERM: (-signal.SIGTERM, 0),
    signal.SIGINT: (130, 0),
}
"""The same of a server that may not have."""


class Server:
    """A server in a forked process; ``started`` is set once it has printed its address."""

    def __init__(self, folder: Path, port: int) -> None:
        readable, writable = os.pipe()
        sys.stdout.flush()
        arguments = ["serve", str(folder), "--port", str(port), "--kv-cache-memory", "4MiB", "--threads", "1"]

        def work() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
            os.dup2(writable, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os._exit(command([*arguments, "--served-model-name", "tiny"]))

        self.pid = fork(work)
        os.close(writable)
        self.started = threading.Event()
        self.port = port
        self._output = os.fdopen(readable)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            if line.startswith("serving"):
                self.port = int(line.rpartition(":")[2].partition("/")[0])
                self.started.set()

    def wait(self) -> int:
        """Waits for the end; returns the exit status, or minus a signal."""
        code = exit_code(self.pid)
        self._reader.join()
        self._output.close()
        return code


class Load:
    """Requests of several clients, until ``stop`` is called."""

    def __init__(self, port: int, expected: dict[str, str], counts: collections.Counter[str]) -> None:
        self.truncated: list[str] = []
        self.wrong: list[str] = []
        self._url, self._expected, self._counts = f"http://127.0.0.1:{port}/v1/completions", expected, counts
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(_CLIENTS)
        self._done = [self._pool.submit(self._ask_all, number) for number in range(_CLIENTS)]

    def stop(self) -> None:
        """Ends the clients, after their current requests."""
        self._over.set()
        self._pool.shutdown()
        for done in self._done:
            done.result()

    def _ask_all(self, client: int) -> None:
        number = client
        with httpx.Client(timeout=30) as http:
            while not self._over.is_set():
                prompt, stream = _PROMPTS[number % len(_PROMPTS)], number % 3 == 0
                number += 1
                begun = False
                try:
                    with http.stream("POST", self._url, json=_body(prompt, stream)) as got:
                        begun = got.status_code == 200
                        text = got.read().decode()
                except httpx.HTTPError as error:
                    self._counts["refused" if not begun else "truncated"] += 1
                    if begun:
                        self.truncated.append(f"{prompt!r}: {error!r}")
                    time.sleep(0.01)
                    continue
                if not begun:
                    self._counts[f"status {got.status_code}"] += 1
                elif stream and "data: [DONE]" not in text:
                    self.truncated.append(text)
                elif (answer := _answer(text, stream)) != self._expected[prompt]:
                    self.wrong.append(f"{prompt!r}: {answer!r} instead of {self._expected[prompt]!r}")
                else:
                    self._counts["answered"] += 1


def _body(prompt: str, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": stream}


def _answer(text: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def _answers(port: int) -> dict[str, str]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        got = {p: http.post("/v1/completions", json=_body(p, False)) for p in _PROMPTS}
    for response in got.values():
        if response.status_code != 200:
            raise RuntimeError(f"the first server answers {response.status_code}: {response.text}")
    return {p: _answer(response.text, False) for p, response in got.items()}


def first_answers(folder: Path) -> tuple[dict[str, str], int, float]:
    """Returns answers by prompt, the port, and the seconds of a start with a stored plan."""
    for _ in range(2):  # the first stores the plan
        began = time.perf_counter()
        server = Server(folder, 0)
        try:
            if not server.started.wait(60):
                raise RuntimeError("the first server does not start")
            seconds = time.perf_counter() - began
            answers = _answers(server.port)
        except BaseException:
            os.kill(server.pid, signal.SIGKILL)  # its reader would keep this process
            raise
        os.kill(server.pid, signal.SIGTERM)
        if server.wait():
            raise RuntimeError("the first server failed")
    return answers, server.port, seconds


def interrupt(rounds: int, seed: int, folder: Path) -> dict[str, int]:
    """Ends servers; returns counts of outcomes.

    Raises:
        RuntimeError: another exit status, a truncated response after SIGTERM or SIGINT, or a wrong answer.
    """
    draw = random.Random(seed)
    os.environ["XDG_CACHE_HOME"], os.environ["ARMLLM_PLAN_CACHE"] = str(folder), "1"
    model = checkpoint(folder / "model", packed=True)
    expected, port, seconds = first_answers(model)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(rounds):
        ending = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        early = draw.random() < 0.2
        server = Server(model, port)
        load = None
        if early:
            time.sleep(draw.random() * seconds)
        else:
            if not server.started.wait(60):
                raise RuntimeError(f"round {number} of seed {seed}: the server does not start")
            load = Load(port, expected, counts)
            time.sleep(draw.random() * 0.5)
        os.kill(server.pid, ending)
        code = server.wait()
        if load is not None:
            load.stop()
        if code not in (_STARTING if early else _STARTED)[ending]:
            raise RuntimeError(f"round {number} of seed {seed}: exit status {code} after {ending.name}")
        if load is not None and (load.wrong or (load.truncated and ending != signal.SIGKILL)):
            raise RuntimeError(f"round {number} of seed {seed}, {ending.name}: {load.wrong} {load.truncated}")
        counts[f"{ending.name}{' at start' if early else ''}"] += 1
    return dict(counts)


def main() -> None:
    """Runs the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = interrupt(options.rounds, options.seed, Path(folder))
    print(json.dumps({"seed": options.seed, **counts}))


if __name__ == "__main__":
    main()
