"""Cost of the router of replicas: an engine in a process of its own behind it, beside one in this process.

    python -m bench.replicas [--shape smollm2] [--rounds 5] [--cores 1] [--replicas 1]

Weights are random.  Both compute the same requests in turn: one stream of 64 tokens, and 64 requests of 32
tokens and 8 answer tokens, 16 at a time.  A row for each has the milliseconds between the tokens of the
stream (median and 99th percentile), or requests a second, and the median of the ratios of neighboring rounds.
Each engine has ``--cores`` threads; with ``--replicas 2 --cores 1`` the one in this process has two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from statistics import median, quantiles

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.case import Row, in_rounds, random_folder, ratios, run
from bench.engine_steps import QUIET, random_tokens
from torch_armllm import AsyncLLM, SamplingParams
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.llm.loading.loader import engine_config

_SETTINGS = {**QUIET, "enable_prefix_caching": False, "kv_cache_memory": 256 << 20}


class _Replicas(AsyncLLM):
    """An `AsyncLLM` whose engines are replicas, also where that is one."""

    def __init__(self, folder: str, count: int, threads: int) -> None:
        names = ("skip_tokenizer_init", "progress")
        settings = {name: value for name, value in _SETTINGS.items() if name not in names}
        config = engine_config({**settings, "threads": threads, "data_parallel_size": count})
        request = ModelRequest(folder, skip_tokenizer_init=True, progress=False)
        self._load_replicas(request, config)
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


def replicas(*, shape: str = "smollm2", rounds: int = 5, cores: int = 1, replicas: int = 1) -> Iterator[Row]:
    with random_folder(shape) as folder:
        inside = AsyncLLM(str(folder), threads=cores * replicas, **_SETTINGS)
        behind = _Replicas(str(folder), replicas, cores)

        def loads(llm: AsyncLLM, number: int) -> tuple[list[float], float]:
            prompts = [random_tokens(32, inside.vocab_size, (number, at)) for at in range(64)]
            return asyncio.run(stream(llm, prompts[0], 64)), asyncio.run(rate(llm, prompts))

        engines = {"in process": inside, "behind the router": behind}
        sides = {name: lambda number, llm=llm: loads(llm, number) for name, llm in engines.items()}
        found = in_rounds(sides, rounds)
        waits = {name: [wait for waits, _ in each for wait in waits] for name, each in found.items()}
        medians = [[median(each) for each, _ in rounds_] for rounds_ in found.values()]
        rates = {name: [each for _, each in rounds_] for name, rounds_ in found.items()}
        yield {
            "load": "1 stream, ms a token",
            **{name: [median(each), quantiles(each, n=100)[98]] for name, each in waits.items()},
            "ratio": median(ratios(medians[1], medians[0])),
        }
        yield {
            "load": "64 requests, requests a second",
            **{name: median(each) for name, each in rates.items()},
            "ratio": median(ratios(rates["behind the router"], rates["in process"])),
        }
        inside.shutdown()
        behind.shutdown()


if __name__ == "__main__":
    run(replicas)
