"""Records of all benchmarks, printed as tables and written as JSON.

A record has all ``KEYS`` and the applicable ``FIGURES``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]

KEYS = ("op", "shape", "dtype", "group_size", "variant", "cpu")
FIGURES = (
    "insn_per_mac",
    "mac_per_cycle",
    "insn_per_elem",
    "cycles_per_elem",
    "limit_per_elem",
    "gops",
    "gb_s",
    "peer",
    "peer_value",
)


def record(
    op: str, shape: str, dtype: str, variant: str, cpu: str, group_size: int = 0, **figures: Any
) -> Record:
    """Returns the record of a measurement; ``group_size`` 0: one scale per row, or an op without groups."""
    unknown = figures.keys() - set(FIGURES)
    assert not unknown, f"no such figure: {sorted(unknown)}"
    keys = dict(zip(KEYS, (op, shape, dtype, group_size, variant, cpu), strict=True))
    return keys | {name: value for name, value in figures.items() if value is not None}


def shown(value: Any) -> str:
    """Formats a number with three or four significant digits."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a Markdown table; columns of numbers are right-aligned."""
    body = list(rows)
    numbers = [any(isinstance(row[i], (int, float)) for row in body) for i in range(len(header))]
    cells = [list(header), *([shown(value) for value in row] for row in body)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "".join("|" + "-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numbers, strict=True))
    return "\n".join([line(cells[0]), rule + "|", *map(line, cells[1:])])


def write_json(records: list[Record], path: str | None = None) -> None:
    """Writes to ``path``, or to the file that the environment's ``JSON`` names; else does nothing."""
    target = path or os.environ.get("JSON")
    if target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(records, indent=1) + "\n")
