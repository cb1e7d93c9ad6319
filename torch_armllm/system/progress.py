"""Progress bars that leave log files alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def progress_bar(iterable: Iterable[Any] | None = None, *, show: bool = True, **options: Any) -> Any:
    """A tqdm bar, in a terminal or a notebook only: elsewhere every refresh would be another line.

    Args:
        iterable: as for tqdm.
        show: False hides the bar everywhere.
        options: of tqdm.
    """
    return tqdm(iterable, disable=not (show and _is_interactive()), **options)


def _is_interactive() -> bool:
    # the streams of a notebook are no terminals, and tqdm.auto draws a widget there
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
