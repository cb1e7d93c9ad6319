"""Measurement of a server at several request rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch_armllm.benchmark.serving.arrivals import run_load
from torch_armllm.benchmark.serving.client import Client, Target
from torch_armllm.benchmark.serving.records import Question
from torch_armllm.benchmark.serving.results import ServingResult, summarize
from torch_armllm.system.progress import progress_bar


class Questions(Protocol):
    """Source of requests."""

    def draw(self, count: int, seed: str) -> list[Question]:
        """Returns ``count`` questions for a seed."""


@dataclass(frozen=True)
class LoadPlan:
    """Runs to measure.

    Attributes:
        num_prompts: requests at each rate.
        rates: requests a second; infinite: all at once.
        max_concurrency: limit of requests in flight; None: no limit.
        warmup: requests before the first rate, not counted.
        seed: seed of the questions and arrival times.
        progress: True to show a progress bar.
    """

    num_prompts: int
    rates: Sequence[float]
    max_concurrency: int | None = None
    warmup: int = 1
    seed: int = 0
    progress: bool = False


async def measure(
    target: Target, questions: Questions, plan: LoadPlan, report: Callable[[str, ServingResult], None]
) -> None:
    """Measures the rates in turn, each with different questions.

    Args:
        target: the server.
        questions: source of the requests.
        plan: rates and numbers of requests.
        report: called after each rate with the model's name and the result.

    Raises:
        ValueError: the first requests fail.
    """
    async with Client(target) as client:
        await client.find_model()
        if plan.warmup:
            first = questions.draw(plan.warmup, f"{plan.seed} warm-up")
            warmup = await run_load(client.ask, first, float("inf"), plan.max_concurrency, "")
            for record in warmup.records:
                if record.error is not None:
                    raise ValueError(f"{target.base_url} does not answer: {record.error}")
        for number, rate in enumerate(plan.rates):
            seed = f"{plan.seed} {number}"
            requests = questions.draw(plan.num_prompts, seed)
            with _bar(plan) as step:
                run = await run_load(client.ask, requests, rate, plan.max_concurrency, seed, step)
            report(client.model, summarize(run, rate, plan.max_concurrency))


@contextmanager
def _bar(plan: LoadPlan) -> Iterator[Callable[[], object]]:
    with progress_bar(total=plan.num_prompts, unit="request", desc="Requests", show=plan.progress) as bar:
        yield bar.update
