"""Plot of throughput against TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_armllm.benchmark.serving.results import ServingResult


def plot(results: Sequence[ServingResult], title: str, file: Path) -> None:
    """Draw throughput against TTFT and TPOT, one point a request rate.

    Args:
        results: results of runs with at least one completed request.
        title: title of the figure.
        file: where to write; its suffix selects the format.

    Raises:
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, 2)
    ordered = sorted(results, key=lambda result: result.request_rate)
    tokens = [result.output_throughput for result in ordered]
    for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
        spreads = [getattr(result, name) for result in ordered]
        axis.plot([spread.median for spread in spreads], tokens, "o-", label="median")
        axis.plot([spread.percentiles[99] for spread in spreads], tokens, "s--", label="P99")
        for result, spread, height in zip(ordered, spreads, tokens, strict=True):
            text = f"{result.request_rate:g}/s"
            axis.annotate(text, (spread.median, height), (4, 4), textcoords="offset points", fontsize=8)
        axis.set_xlabel(f"{name.upper()}, ms")
        axis.set_ylabel("output tokens a second")
        axis.margins(0.12)  # room for the labels
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=150)
