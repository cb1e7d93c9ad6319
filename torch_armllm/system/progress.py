"""Progress bars in terminals and notebooks, and lines of progress elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm
from tqdm.std import tqdm as plain_tqdm

LINE_INTERVAL = 30.0
"""Seconds between lines where the output is no terminal; work that takes less prints none."""


class ProgressLines(plain_tqdm):
    """Progress as lines of text, for log files: a bar would be drawn over itself there, again and again.

    It takes tqdm's arguments, and prints a line every 30 seconds, and one at the end of longer work.
    """

    def __init__(self, iterable: Iterable[Any] | None = None, **options: Any) -> None:
        self._next_line = LINE_INTERVAL
        self._printed = 0
        pace = {"mininterval": LINE_INTERVAL, "delay": LINE_INTERVAL, "miniters": 1, "dynamic_ncols": False}
        super().__init__(iterable, **{**options, **pace})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Prints a line, unless the last one is recent."""
        elapsed = self.format_dict["elapsed"]
        if elapsed >= self._next_line:
            self._next_line = elapsed + LINE_INTERVAL
            self._print(elapsed)

    def close(self) -> None:
        """Prints the last line if there were others; see tqdm."""
        if not self.disable and 0 < self._printed < self.n:
            self._print(self.format_dict["elapsed"])
        self.delay = math.inf  # nothing that tqdm would have to clear is on the screen
        super().close()

    def _print(self, elapsed: float) -> None:
        found = self.format_dict
        total, unit = found["total"], found["unit"]
        counted = f"{self.n}/{total}" if total else f"{self.n}"
        label = (found["prefix"] or "progress").rstrip(": ")
        parts = [
            f"{label}: {counted}" + ("" if unit == "it" else f" {unit}s"),
            f"{self.format_interval(elapsed)} elapsed",
        ]
        if total and self.n:
            parts.append(f"{self.format_interval((total - self.n) * elapsed / self.n)} left")
        if found["postfix"]:
            parts.append(found["postfix"])
        self.fp.write(", ".join(parts) + "\n")
        self.fp.flush()
        self._printed = self.n


def progress_bar(iterable: Iterable[Any] | None = None, *, show: bool = True, **options: Any) -> Any:
    """A tqdm bar in a terminal or a notebook, and `ProgressLines` elsewhere.

    Args:
        iterable: as for tqdm.
        show: False hides the bar everywhere.
        options: of tqdm.
    """
    if not show:
        return tqdm(iterable, disable=True, **options)
    return (tqdm if _is_interactive() else ProgressLines)(iterable, disable=False, **options)


def _is_interactive() -> bool:
    # the streams of a notebook are no terminals, and tqdm.auto draws a widget there
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
