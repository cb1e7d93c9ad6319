"""Bar chart of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.peers.results import OURS, Record
from bench.peers.shapes import SHAPES


def plot(results: Sequence[Record], path: Path) -> None:
    """Draw bars of each engine's rates relative to ours, one panel per model.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'torch_armllm[bench]'") from error
    rows = [r for r in results if r.get("ratio_to_ours")]
    models = list(dict.fromkeys(r["model"] for r in rows))
    engines = sorted({r["engine"] for r in rows}, key=lambda e: (e != OURS, e))
    figure = Figure(figsize=(4.5 * max(1, len(models)), 4.5), layout="constrained")
    for column, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), column + 1)
        here = [r for r in rows if r["model"] == model]
        works = list(dict.fromkeys(r["work"] for r in here))
        height = 0.8 / len(engines)
        for i, engine in enumerate(engines):
            bars = {works.index(r["work"]): r for r in here if r["engine"] == engine}
            positions = [at + i * height for at in bars]
            drawn = axes.barh(positions, [r["ratio_to_ours"] for r in bars.values()], height, label=engine)
            rates = [f"{median(r['tok_s']):.0f}" for r in bars.values()]
            axes.bar_label(drawn, rates, fontsize=7, padding=2)
        axes.set_yticks([at + 0.4 - height / 2 for at in range(len(works))], works)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("rate relative to ours (figures: tok/s)")
        axes.set_title(SHAPES[model].title)
        axes.legend(fontsize=8)
    figure.savefig(path)
