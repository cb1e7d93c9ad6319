"""Open-loop load: requests arrive at random times with a given rate."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from torch_armllm.benchmark.serving.records import Question, Record


@dataclass(frozen=True)
class LoadRun:
    """All requests at one rate.

    Attributes:
        records: in the order of the questions.
        seconds: from the first request to the end of the last output.
        peak: largest number of requests in flight.
    """

    records: list[Record]
    seconds: float
    peak: int


def arrival_times(rate: float, seed: str) -> Iterator[float]:
    """Returns arrival times in seconds: a Poisson process that starts at 0; all 0 for an infinite rate."""
    source = random.Random(seed)
    now = 0.0
    while True:
        yield now
        if math.isfinite(rate):
            now += source.expovariate(rate)


async def run_load(
    ask: Callable[[Question], Awaitable[Record]],
    questions: Sequence[Question],
    rate: float,
    max_concurrency: int | None,
    seed: str,
    done: Callable[[], object] = lambda: None,
) -> LoadRun:
    """Sends every request at its arrival time.

    Args:
        ask: sends a request and waits for the end of its output.
        questions: at least one.
        rate: requests a second; infinite: all at once.
        max_concurrency: limit of requests in flight.  Further requests are sent once another has ended, and
            their time starts then.
        seed: seed of the arrival times.
        done: called after each completed request.
    """
    running = peak = 0
    seats: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def one(question: Question) -> Record:
        nonlocal running, peak
        async with seats:
            running += 1
            peak = max(peak, running)
            try:
                return await ask(question)
            finally:
                running -= 1
                done()

    began = time.perf_counter()
    tasks: list[asyncio.Task[Record]] = []
    try:
        for question, due in zip(questions, arrival_times(rate, seed), strict=False):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(question)))
        records = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return LoadRun(records, time.perf_counter() - began, peak)
