"""Cost of the router of replicas: an engine in a process of its own behind it, beside one in this process.

    python -m bench.replicas [--shape smollm2] [--rounds 5] [--cores 1] [--replicas 1]

Weights are random.  Both compute the same requests in turn: one stream of 64 tokens, and 64 requests of 32
tokens and 8 answer tokens, 16 at a time.  Prints a JSON line for each: milliseconds between the tokens of the
stream (median and 99th percentile), or requests a second, and the median of the ratios of neighboring rounds.
Each engine has ``--cores`` threads; with ``--replicas 2 --cores 1`` the one in this process has two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from transformers import AutoConfig

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.peers.shapes import SHAPES
from torch_armllm import AsyncLLM, SamplingParams
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.llm.replica_loader import load_replicas

_SETTINGS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "progress": False, "speculative_config": None},
    **{"enable_prefix_caching": False, "kv_cache_memory": 256 << 20, "disable_log_stats": True},
}


class _Replicas(AsyncLLM):
    """An `AsyncLLM` whose engines are replicas, also where that is one."""

    def __init__(self, folder: str, count: int, threads: int) -> None:
        from torch_armllm.llm.loader import engine_config

        names = ("skip_tokenizer_init", "progress")
        settings = {name: value for name, value in _SETTINGS.items() if name not in names}
        config = engine_config({**settings, "threads": threads, "data_parallel_size": count})
        request = ModelRequest(folder, skip_tokenizer_init=True, progress=False)
        self.replicas, self._tokenizer = load_replicas(request, config)
        self.llm_engine = self.replicas  # type: ignore[assignment]
        self.pooling_engine = None
        self._start()


async def stream(llm: AsyncLLM, prompt: list[int], tokens: int) -> list[float]:
    """Returns the milliseconds between the tokens of a stream."""
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    times = []
    async with aclosing(llm.generate(prompt, params)) as outputs:
        async for _ in outputs:
            times.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in zip(times[:-1], times[1:], strict=True)]


async def rate(llm: AsyncLLM, prompts: list[list[int]]) -> float:
    """Returns the requests a second of streams, 16 at a time."""
    room = asyncio.Semaphore(16)

    async def one(prompt: list[int]) -> None:
        async with room:
            await stream(llm, prompt, 8)

    began = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    return len(prompts) / (time.perf_counter() - began)


def measure(shape: str, rounds: int, cores: int, replicas: int) -> None:
    """Prints the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(AutoConfig.for_model(**SHAPES[shape].config), Path(folder))
        inside = AsyncLLM(folder, threads=cores * replicas, **_SETTINGS)
        behind = _Replicas(folder, replicas, cores)
        random = Random(0)
        waits: tuple[list[float], list[float]] = ([], [])
        rates: tuple[list[float], list[float]] = ([], [])
        medians: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            prompts = [[random.randrange(10, inside.vocab_size) for _ in range(32)] for _ in range(64)]
            for at in (0, 1) if number % 2 else (1, 0):
                llm = (inside, behind)[at]
                found = asyncio.run(stream(llm, prompts[0], 64))
                requests = asyncio.run(rate(llm, prompts))
                if number:
                    waits[at].extend(found)
                    medians[at].append(median(found))
                    rates[at].append(requests)
        print(
            json.dumps(
                {"shape": shape, "load": "1 stream", "unit": "ms a token"}
                | {
                    name: [round(median(times), 3), round(quantiles(times, n=100)[98], 3)]
                    for name, times in zip(("in process", "behind the router"), waits, strict=True)
                }
                | {"ratio": round(median([b / a for a, b in zip(*medians, strict=True)]), 3)}
            )
        )
        print(
            json.dumps(
                {"shape": shape, "load": "64 requests", "unit": "requests a second"}
                | {
                    name: round(median(each), 1)
                    for name, each in zip(("in process", "behind the router"), rates, strict=True)
                }
                | {"ratio": round(median([b / a for a, b in zip(*rates, strict=True)]), 3)}
            )
        )
        inside.shutdown()
        behind.shutdown()


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    measure(options.shape, options.rounds, options.cores, options.replicas)


if __name__ == "__main__":
    main()
