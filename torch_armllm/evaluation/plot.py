"""Plot of scores against bits per weight, with error bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_armllm.evaluation.comparison import Line, shown
from torch_armllm.evaluation.results_file import VariantResult

_COLUMNS = 3


def plot(lines: Sequence[Line], variants: Mapping[str, VariantResult], title: str, file: Path) -> None:
    """Draws a panel per task and metric.

    Args:
        lines: the comparison.
        variants: the results, with the bits per weight.
        title: the title of the figure.
        file: the file to write; its suffix is the format.

    Raises:
        ValueError: matplotlib does not support the format.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Line]] = {}
    for line in shown(lines):
        panels.setdefault((line.task, line.metric), []).append(line)
    columns = min(_COLUMNS, max(len(panels), 1))
    height = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.2 * columns, 3.2 * height), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(height, columns, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, ((task, metric), members) in zip(grid.flat, panels.items(), strict=False):
        for line in members:
            bits = variants[line.scheme].bits or 0.0
            axis.errorbar([bits], [line.score], yerr=[line.stderr or 0.0], fmt="o", capsize=3)
            axis.annotate(line.scheme, (bits, line.score), (5, 4), textcoords="offset points", fontsize=8)
        axis.set_title(f"{task}, {metric}", fontsize=9)
        axis.set_xlabel("bits per weight")
        axis.set_xscale("log", base=2)
        axis.margins(0.25)  # room for the names next to the points
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
