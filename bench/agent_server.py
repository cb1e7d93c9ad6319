"""Servers of OpenAI's API in processes of their own, and the cost of a streamed chat request to them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATIENCE = 600
"""Seconds that a server may take to start, and a request to end."""


@dataclass(frozen=True)
class Cost:
    """Tokens and times of a request.

    Attributes:
        prompt: tokens of its prompt.
        hit: those of them that came from the cache.
        first: seconds to the first token.
        total: seconds to the last one.
    """

    prompt: int
    hit: int
    first: float
    total: float


@contextmanager
def own_server(folder: str, options: Sequence[str]) -> Iterator[int]:
    """Runs ``torch-armllm serve``; gives its port."""
    command = [sys.executable, "-m", "torch_armllm", "serve", folder, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            found = next(
                (re.search(r" at http://[^/]*:(\d+)", line) for line in lines if "serving" in line), None
            )
            if found is None:
                raise RuntimeError("the server did not start, for the reason above")
            threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
            yield int(found[1])
        finally:
            process.terminate()


@contextmanager
def llama_server(binary: Path, gguf: Path, options: Sequence[str]) -> Iterator[int]:
    """Runs ``llama-server``; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--jinja", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
        try:
            _wait(process, port)
            yield port
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    """Waits until ``/health`` is 200."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}; run it to see why")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"llama-server was not ready after {_PATIENCE} s")


def chat(port: int, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], answer: int) -> Cost:
    """Sends a streamed chat request and measures it.

    Args:
        port: of the server.
        messages: in OpenAI's form.
        tools: likewise.
        answer: tokens of the answer.

    Raises:
        RuntimeError: the server refuses the request.
    """
    body = {
        "messages": messages,
        "tools": tools,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answers {response.status}: {response.read(2000).decode()}")
    first, usage, timings = None, {}, {}
    for event in _events(response):
        if "error" in event:
            raise RuntimeError(f"the server answers {event['error']}")
        if first is None and any(_has_text(choice["delta"]) for choice in event.get("choices", ())):
            first = time.perf_counter() - began
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
    total = time.perf_counter() - began
    connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", timings.get("cache_n", 0))
    return Cost(usage["prompt_tokens"], cached or 0, total if first is None else first, total)


def _has_text(delta: dict[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)
