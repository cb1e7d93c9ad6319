"""Figures of a run, under vLLM's names."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_armllm.benchmark.serving.arrivals import LoadRun

PERCENTILES = (25, 50, 75, 99)


@dataclass(frozen=True)
class Spread:
    """Statistics of times in milliseconds; all 0 without data.

    Attributes:
        mean, median, std: of all times; the standard deviation is that of the population.
        percentiles: P25, P50, P75 and P99, linearly interpolated.
    """

    mean: float
    median: float
    std: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Returns the statistics of times in seconds."""
        ordered = sorted(1000 * one for one in seconds) or [0.0]
        shares = {percent: percentile(ordered, percent) for percent in PERCENTILES}
        return cls(statistics.fmean(ordered), statistics.median(ordered), statistics.pstdev(ordered), shares)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of sorted values, interpolated as numpy does."""
    position = (len(ordered) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


@dataclass(frozen=True)
class ServingResult:
    """One run; fields as in vLLM's benchmark, rates a second, times in milliseconds.

    Attributes:
        request_rate: as requested; infinite: all at once.
        max_concurrency: as requested; None: no limit.
        duration: seconds.
        completed, failed: numbers of requests.
        errors: number of occurrences of each message.
        total_input_tokens, total_output_tokens: of the completed requests.
        request_throughput, output_throughput, total_token_throughput: of the completed requests.
        max_output_tokens_per_s: chunks of text in the best second.
        max_concurrent_requests: largest number of requests in flight.
        ttft: time to the first text.
        tpot: time per token after the first, one value per request.
        itl: time between consecutive chunks of text, over all requests.
        e2el: time to the end.
    """

    request_rate: float
    max_concurrency: int | None
    duration: float
    completed: int
    failed: int
    errors: dict[str, int]
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures in vLLM's layout; an infinite rate is the string ``inf``."""
        figures = {k: v for k, v in asdict(self).items() if k not in ("ttft", "tpot", "itl", "e2el")}
        if math.isinf(self.request_rate):
            figures["request_rate"] = "inf"
        for name in ("ttft", "tpot", "itl", "e2el"):
            spread: Spread = getattr(self, name)
            figures[f"mean_{name}_ms"] = spread.mean
            figures[f"median_{name}_ms"] = spread.median
            figures[f"std_{name}_ms"] = spread.std
            figures.update({f"p{p}_{name}_ms": value for p, value in spread.percentiles.items()})
        return figures


def summarize(run: LoadRun, rate: float, max_concurrency: int | None) -> ServingResult:
    """Returns the figures of a run.

    Args:
        run: the records of the run.
        rate: requested rate.
        max_concurrency: requested limit.
    """
    good = [record for record in run.records if record.error is None]
    read = sum(record.prompt_tokens or 0 for record in good)
    written = sum(record.output_tokens for record in good)
    start = min((record.started for record in run.records), default=0.0)
    by_second = Counter(int(time - start) for record in good for time in record.arrivals)
    return ServingResult(
        request_rate=rate,
        max_concurrency=max_concurrency,
        duration=run.seconds,
        completed=len(good),
        failed=len(run.records) - len(good),
        errors=dict(Counter(record.error for record in run.records if record.error is not None)),
        total_input_tokens=read,
        total_output_tokens=written,
        request_throughput=len(good) / run.seconds,
        output_throughput=written / run.seconds,
        total_token_throughput=(read + written) / run.seconds,
        max_output_tokens_per_s=float(max(by_second.values(), default=0)),
        max_concurrent_requests=run.peak,
        ttft=Spread.of([record.ttft for record in good]),
        tpot=Spread.of([tpot for record in good if (tpot := record.tpot) is not None]),
        itl=Spread.of([gap for record in good for gap in record.itl]),
        e2el=Spread.of([record.latency for record in good]),
    )
