"""Picture of KL over bits a weight, a panel for each float model.

    python -m bench.quality.picture --files FILE,FILE --out docs/images/kl-over-bits.svg

FILEs are those of ``python -m bench.quality_peers --json``; files of the same model share a panel.  Bars are
standard errors.  The background is white, so that the picture can be read in light and in dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from bench.case import run
from bench.quality.labels import Rectangle, placed
from bench.quality.results import Results, Row, read

STYLES = {
    "ours, rtn": ("#6baed6", "o"),
    "ours, mse": ("#2171b5", "o"),
    "ours, awq": ("#6a51a3", "o"),
    "ours, gptq": ("#08306b", "o"),
    "ours, gptq, INT16 activations": ("#041530", "P"),
    "llama.cpp": ("#e08214", "s"),
    "llama.cpp, imatrix": ("#993404", "s"),
    "torchao": ("#4d9221", "^"),
    "HQQ, float activations": ("#c51b7d", "v"),
}
"""Color and marker of each series, in the legend's order."""
OTHER = ("#555555", "D")
"""Those of all other series."""
_WIDEST = 16
"""Bits of a weight that a quantized model has at most."""
_LETTER = 4.6
"""Width of a letter of a name, in points."""


def draw(results: Sequence[Results], file: Path) -> None:
    """Draws the rows of quantized models that have bits.

    Args:
        results: of one comparison or more.
        file: the file to write; its suffix is the format.

    Raises:
        ValueError: no row can be drawn, or matplotlib does not support the format.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'torch_armllm[bench]'") from error
    rows: dict[str, list[Row]] = {}
    for result in results:
        rows.setdefault(result.model, []).extend(result.rows)
    panels = {model: points for model, every in rows.items() if (points := drawn(every))}
    if not panels:
        raise ValueError(f"no row of {', '.join(rows)} is a quantized model with bits: nothing to draw")
    # text stays text, and the same rows give the same bytes
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kl", "font.size": 9}):
        figure = Figure(figsize=(5 * len(panels), 5.6), layout="constrained", facecolor="white")
        figure.subplots(1, len(panels))
        for axis, (model, points) in zip(figure.axes, panels.items(), strict=True):
            _draw(axis, points)
            axis.set_title(model)
        _explain(figure)
        figure.draw_without_rendering()  # settles where points are
        for axis, points in zip(figure.axes, panels.values(), strict=True):
            _name(axis, points)
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, metadata=metadata)


def drawn(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of quantized models that have bits; a later row replaces an earlier of its name."""
    named = {row.name: row for row in rows}
    return [row for row in named.values() if row.bits is not None and row.bits < _WIDEST]


def _draw(axis: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for series in dict.fromkeys(row.series for row in rows):
        points = [row for row in rows if row.series == series]
        bits, values = [row.bits for row in points], [row.kl.value for row in points]
        errors = [row.kl.stderr for row in points]
        color, marker = STYLES.get(series, OTHER)
        axis.errorbar(bits, values, errors, color=color, marker=marker, ls="none", capsize=2, label=series)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("bits a weight of the linear layers")
    axis.set_ylabel("KL to the float model, nats a token")
    axis.margins(0.12)  # room for the names next to the points
    axis.grid(alpha=0.3)


def _explain(figure: Any) -> None:
    """Draws the legend of all panels."""
    labels: dict[str, Any] = {}
    for axis in figure.axes:
        handles, names = axis.get_legend_handles_labels()
        labels.update(zip(names, handles, strict=True))
    order = [*(name for name in STYLES if name in labels), *(name for name in labels if name not in STYLES)]
    figure.legend(
        [labels[name] for name in order], order, loc="outside lower center", ncols=2 * len(figure.axes)
    )


def _name(axis: Any, rows: Sequence[Row]) -> None:
    """Writes the formats' names beside their points."""
    unit = axis.figure.dpi / 72
    points = [axis.transData.transform((row.bits, row.kl.value)) / unit for row in rows]
    names = [row.name.split(",")[0] for row in rows]
    panel = Rectangle(*(axis.bbox.extents / unit))
    boxes = placed([(x, y) for x, y in points], [_LETTER * len(name) for name in names], panel)
    for row, name, (x, y), box in zip(rows, names, points, boxes, strict=True):
        text = axis.annotate(
            name,
            (row.bits, row.kl.value),
            ((box.x0 + box.x1) / 2 - x, (box.y0 + box.y1) / 2 - y),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7,
            color=STYLES.get(row.series, OTHER)[0],
        )
        text.set_in_layout(False)  # the points stay where they are


def picture(
    *,
    files: Annotated[tuple[Path, ...], "JSON files with rows"],
    out: Annotated[Path, "file to draw; .svg, .png or .pdf"],
) -> None:
    draw([read(file) for file in files], out)


if __name__ == "__main__":
    run(picture)
