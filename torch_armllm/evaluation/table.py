"""A comparison as text: a table with a line per task, metric and variant."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from torch_armllm.evaluation.comparison import Line, shown
from torch_armllm.evaluation.results_file import VariantResult
from torch_armllm.system.text_layout import WIDTH

_HEADER = (
    *("task", "rows", "metric", "scheme", "score", "change", "p"),
    *("changed", "Δ log-lik.", "KL divergence", "same top-1"),
)
_NOTE = (
    "score ± standard error. change: score − the first scheme's, for perplexities the ratio, ± the paired "
    "standard error. p: McNemar's exact test. changed: share of rows answered otherwise. Δ log-lik.: mean "
    "absolute change of a log-likelihood, nats. KL divergence from the first scheme, nats a token; same "
    "top-1: share of tokens."
)


def cells(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Returns the table's cells, header first."""
    rows = [
        (
            *(line.task, str(line.rows), line.metric, line.scheme),
            _with_error(line.score, line.stderr),
            _change(line),
            "" if line.p is None else f"{line.p:.3f}",
            "" if line.changed is None else f"{100 * line.changed:.1f} %",
            "" if line.moved is None else f"{line.moved:.3f}",
            "" if line.kl is None else _with_error(line.kl, line.kl_stderr),
            "" if line.agreement is None else f"{100 * line.agreement:.1f} %",
        )
        for line in shown(lines)
    ]
    return [_HEADER, *rows]


def as_text(lines: Sequence[Line], schemes: Mapping[str, VariantResult]) -> str:
    """Formats the comparison for a terminal."""
    table = cells(lines)
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADER))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(
        [*_summary(schemes), "", *(row.rstrip() for row in rows), "", textwrap.fill(_NOTE, WIDTH)]
    )


def as_markdown(lines: Sequence[Line], schemes: Mapping[str, VariantResult], title: str) -> str:
    """Formats the comparison as a Markdown page."""
    header, *rows = cells(lines)
    parts = [
        f"# {title}",
        "",
        *(f"- {line}" for line in _summary(schemes)),
        "",
        _markdown_row(header),
        _markdown_row(["---"] * len(header)),
        *(_markdown_row(row) for row in rows),
        "",
        _NOTE,
        "",
    ]
    return "\n".join(parts)


def _markdown_row(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _summary(schemes: Mapping[str, VariantResult]) -> list[str]:
    lines = []
    for name, result in schemes.items():
        seconds = sum(task.seconds for task in result.tasks.values())
        size = (
            ""
            if result.bits is None
            else f"{result.bits:.2f} bits a weight, {(result.bytes or 0) / 1e6:.0f} MB, "
        )
        failed = "" if result.error is None else f"; failed: {result.error}"
        lines.append(f"{name}: {size}{seconds:.0f} s{failed}")
    return lines


def _change(line: Line) -> str:
    if line.change is None:
        return ""
    if line.is_ratio:
        return "× " + _with_error(line.change, line.change_stderr)
    return _with_error(line.change, line.change_stderr, "+")


def _with_error(value: float, error: float | None, sign: str = "") -> str:
    """Formats a value with its error, with 4 decimals below 10 and 2 above."""
    digits = 4 if abs(value) < 10 else 2
    if error is None or math.isnan(error):
        return f"{value:{sign}.{digits}f}"
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"
