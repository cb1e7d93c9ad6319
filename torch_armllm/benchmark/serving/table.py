"""Text table of a run in the layout of vLLM's benchmark, for people and scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch_armllm.benchmark.serving.results import ServingResult, Spread

_WIDTH = 50


def table(result: ServingResult) -> str:
    """Formats the table of a run."""
    return "\n".join(_lines(result))


def _lines(result: ServingResult) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", result.completed)
    yield _line("Failed requests:", result.failed)
    if result.max_concurrency is not None:
        yield _line("Maximum request concurrency:", result.max_concurrency)
    if math.isfinite(result.request_rate):
        yield _line("Request rate configured (RPS):", result.request_rate)
    yield _line("Benchmark duration (s):", result.duration)
    yield _line("Total input tokens:", result.total_input_tokens)
    yield _line("Total generated tokens:", result.total_output_tokens)
    yield _line("Request throughput (req/s):", result.request_throughput)
    yield _line("Output token throughput (tok/s):", result.output_throughput)
    yield _line("Peak output token throughput (tok/s):", result.max_output_tokens_per_s)
    yield _line("Peak concurrent requests:", float(result.max_concurrent_requests))
    yield _line("Total Token throughput (tok/s):", result.total_token_throughput)
    for name, header, spread in (
        ("TTFT", "Time to First Token", result.ttft),
        ("TPOT", "Time per Output Token (excl. 1st token)", result.tpot),
        ("ITL", "Inter-token Latency", result.itl),
        ("E2EL", "End-to-end Latency", result.e2el),
    ):
        yield f"{header:-^{_WIDTH}}"
        yield from _spread(name, spread)
    yield "=" * _WIDTH


def _spread(name: str, spread: Spread) -> Iterator[str]:
    yield _line(f"Mean {name} (ms):", spread.mean)
    yield _line(f"Median {name} (ms):", spread.median)
    for percent, value in spread.percentiles.items():
        yield _line(f"P{percent} {name} (ms):", value)


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"
