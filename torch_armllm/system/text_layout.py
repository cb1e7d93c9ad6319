"""Labeled lines of text that stay within a terminal's width."""

from __future__ import annotations

import textwrap

WIDTH = 80


def labeled(label: str, text: object, indent: int) -> str:
    """Returns a label and its text, wrapped at 80 columns; words longer than a line stay whole.

    Args:
        label: stands in the first ``indent`` columns.
        text: printed from column ``indent`` on, on as many lines as it needs.
        indent: more than the label's length.
    """
    return textwrap.fill(
        str(text),
        WIDTH,
        initial_indent=f"{label:<{indent}}",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
