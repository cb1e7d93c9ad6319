"""How throughput is paid for: by the wait for the first token, and for each one after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_armllm.benchmark.serving.results import ServingResult


def require_matplotlib() -> None:
    """Fails before anything is measured.

    Raises:
        ImportError: it is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"--plot: {error}: pip install 'torch_armllm[bench]'") from error


def plot(results: Sequence[ServingResult], title: str, file: Path) -> None:
    """Draws throughput against TTFT and TPOT, a point a request rate.

    Args:
        results: of runs in which something was answered.
        title: above it all.
        file: whose suffix says the format.

    Raises:
        ValueError: the format is none that matplotlib knows.
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
        axis.margins(0.12)  # for the rates beside the points
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=150)
