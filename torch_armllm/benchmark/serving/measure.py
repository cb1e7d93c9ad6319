"""A server's figures at several request rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch_armllm.benchmark.serving.arrivals import run_load
from torch_armllm.benchmark.serving.client import Client, Target
from torch_armllm.benchmark.serving.records import Question
from torch_armllm.benchmark.serving.results import ServingResult, summarize


class Questions(Protocol):
    """Source of requests."""

    def draw(self, count: int, seed: str) -> list[Question]:
        """So many questions."""


@dataclass(frozen=True)
class Plan:
    """Runs to measure.

    Attributes:
        num_prompts: requests at each rate.
        rates: requests a second; infinite: all at once.
        max_concurrency: requests that run at once; None: any number.
        warmup: requests before the first rate, which do not count.
        seed: of questions and times.
        progress: shows a bar.
    """

    num_prompts: int
    rates: Sequence[float]
    max_concurrency: int | None = None
    warmup: int = 1
    seed: int = 0
    progress: bool = False


async def measure(
    target: Target, questions: Questions, plan: Plan, tell: Callable[[str, ServingResult], None]
) -> None:
    """Measures one rate after the other, each with questions of its own.

    Args:
        target: the server.
        questions: what it is asked.
        plan: how much and how often.
        tell: called after each rate with the model's name and what was found.

    Raises:
        ValueError: the server does not answer the first requests.
    """
    async with Client(target) as client:
        await client.find_model()
        if plan.warmup:
            first = questions.draw(plan.warmup, f"{plan.seed} warm-up")
            found = await run_load(client.ask, first, float("inf"), plan.max_concurrency, "")
            for record in found.records:
                if record.error is not None:
                    raise ValueError(f"{target.base_url} does not answer: {record.error}")
        for number, rate in enumerate(plan.rates):
            seed = f"{plan.seed} {number}"
            asked = questions.draw(plan.num_prompts, seed)
            with _bar(plan) as step:
                run = await run_load(client.ask, asked, rate, plan.max_concurrency, seed, step)
            tell(client.model, summarize(run, rate, plan.max_concurrency))


@contextmanager
def _bar(plan: Plan) -> Iterator[Callable[[], object]]:
    from tqdm import tqdm

    with tqdm(total=plan.num_prompts, unit="request", disable=not plan.progress) as bar:
        yield bar.update
