"""Mixed load on a server for a long time, with a check that its memory stays flat.

    python -m tests.faults.soak [--minutes 30] [--seed 0] [--json FILE]

``torch-armllm serve`` runs a tiny model in a process of its own.  Clients send completions, chats with tools,
structured outputs, embeddings and invalid requests, streamed or not; some disconnect at a random moment.  One
client loads and unloads a second model.  Each ten seconds a line reports the server's anonymous memory and
threads.  At the end the server computes the tokens that it computed at first, has no request left, and exits
with status 0 after SIGTERM.  The exit status is 1 if something else happened, or if memory grew by more than
5 % and 8 MB after the first sixth of the time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import of huggingface_hub

from tests.fuzz.serving.http import ADMIN, ADMIN_KEY, PROBE, check, draw_request
from tests.support.server_live import NAME
from tests.support.tiny_server import checkpoint

_CLIENTS = 6
_INTERVAL = 10.0  # seconds
_ALLOWED_GROWTH, _ALLOWED_BYTES = 1.05, 8 << 20
_OPTIONS = [
    "--kv-cache-memory",
    "4MiB",
    "--max-num-seqs",
    "16",
    "--max-tokens",
    "32",
    "--drain-timeout",
    "10",
]


class Soak:
    """A server under load, and what was seen of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []
        self.samples: list[tuple[float, int, int]] = []
        self._folder, self._seed = checkpoint(folder), seed
        self._over = threading.Event()
        options = [*_OPTIONS, "--served-model-name", NAME, "--admin-api-key", ADMIN_KEY, "--port", "0"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_armllm.cli.main", "serve", str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self._base = self._process.stdout.readline().split(" at ")[1].strip().removesuffix("/v1")

    def run(self, seconds: float, is_enough: Callable[[], bool] = lambda: True) -> None:
        """Runs the load for a time, and until it was enough or something was found; ends the server."""

        def goes_on(now: float) -> bool:
            return now < seconds or not (is_enough() or self.findings)

        with httpx.Client(base_url=self._base, timeout=60) as http, ThreadPoolExecutor(_CLIENTS + 1) as pool:
            expected = http.post("/v1/completions", json=PROBE).json()["choices"][0]["text"]
            work = [pool.submit(self._client, number) for number in range(_CLIENTS)]
            work.append(pool.submit(self._reload))
            began = time.monotonic()
            while goes_on(now := time.monotonic() - began) and self._process.poll() is None:
                self._sample(now)
                time.sleep(min(_INTERVAL, max(0.5, seconds - now)))
            self._over.set()
            for done in work:
                done.result()
            got = http.post("/v1/completions", json=PROBE).json()["choices"][0]["text"]
            if got != expected:
                self.findings.append(f"{PROBE} returns {got!r}, and {expected!r} at first")
            metrics = http.get("/metrics").text
            for name in ("num_requests_running", "num_requests_waiting"):
                left = re.findall(rf"^vllm:{name}{{.*}} (.*)$", metrics, re.MULTILINE)
                if not left or any(float(value) for value in left):
                    self.findings.append(f"{name} is {left} without requests")
        self._process.send_signal(signal.SIGTERM)
        if status := self._process.wait(60):
            self.findings.append(f"exit status {status}")

    def growth(self) -> tuple[int, int]:
        """Returns the median memory of the second sixth of the time and of the last sixth, in bytes."""
        sizes = [size for _, size, _ in self.samples]
        sixth = max(1, len(sizes) // 6)
        return int(statistics.median(sizes[sixth : 2 * sixth] or sizes)), int(
            statistics.median(sizes[-sixth:])
        )

    def _sample(self, seconds: float) -> None:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        size = int(re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024
        threads = int(re.findall(r"^Threads:\s+(\d+)$", status, re.MULTILINE)[0])
        self.samples.append((seconds, size, threads))
        sent = sum(count for name, count in self.counts.items() if name != "disconnected")
        print(f"{seconds:7.0f} s {size / 1e6:8.1f} MB {threads:4} threads {sent:9,} requests", flush=True)

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        with httpx.Client(base_url=self._base, timeout=60) as http:
            while not self._over.is_set():
                method, path, content, headers = draw_request(draw)
                if path.startswith(ADMIN):
                    continue  # the models of another client
                try:
                    if draw.random() < 0.1:
                        self._leave(http, draw, path, content, headers)
                        continue
                    got = http.request(method, path, content=content, headers=headers)
                    check(got)
                    self.counts[str(got.status_code)] += 1
                except Exception as error:
                    self.findings.append(f"{method} {path} {content[:500]!r}: {error!r}")
                    return

    def _leave(
        self, http: httpx.Client, draw: random.Random, path: str, content: bytes, headers: dict[str, str]
    ) -> None:
        """Disconnects at a random moment."""
        body = json.dumps({"prompt": "a", "max_tokens": 32, "ignore_eos": True, "stream": True, "n": 2})
        if draw.random() < 0.5:
            path, content = "/v1/completions", body.encode()
        self.counts["disconnected"] += 1
        with http.stream("POST", path, content=content, headers=headers) as got:
            for _ in got.iter_raw():
                if draw.random() < 0.4:
                    return

    def _reload(self) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        load = {"model": str(self._folder), "name": "other", "max_model_len": 128, "threads": 1}
        with httpx.Client(base_url=self._base, timeout=120, headers=headers) as http:
            while not self._over.wait(2.0):
                for got in (
                    http.post(ADMIN, json=load),
                    http.post("/v1/completions", json={**PROBE, "model": "other"}),
                    http.delete(f"{ADMIN}/other"),
                ):
                    if got.status_code != 200:
                        self.findings.append(f"{got.request.method} {got.request.url}: {got.text}")
                        return
                self.counts["loaded"] += 1


def main() -> int:
    """Runs the load that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.seed)
        soak.run(60 * options.minutes)
    first, last = soak.growth()
    if last > max(first * _ALLOWED_GROWTH, first + _ALLOWED_BYTES):
        soak.findings.append(f"memory grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB")
    if options.json:
        options.json.write_text(json.dumps(soak.samples))
    summary = {"minutes": options.minutes, "bytes": [first, last], **soak.counts, "findings": soak.findings}
    print(json.dumps(summary))
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
