"""Prompt files for benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Messages: TypeAlias = "list[dict[str, Any]]"


def read_prompt_file(file: Path) -> list[str | Messages]:
    """Returns the prompts of a file: strings, and conversations as lists of messages.

    Args:
        file: a ``.jsonl`` file or a text file.  Each JSON line has ``prompt``, a string, or ``turns``.  Turns
            are messages with ``role`` and ``content``, or strings; only the first string is used, as the
            question.  Each line of a text file is a prompt.

    Raises:
        ValueError: there is no prompt, or a line has another form; the message names the line.
        OSError: the file cannot be read.
    """
    prompts = list(_entries(file))
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _entries(file: Path) -> Iterator[str | Messages]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            yield line
            continue
        try:
            yield _entry(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error


def _entry(entry: Any) -> str | Messages:
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return str(entry["prompt"])
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ValueError("an entry needs 'prompt', a text, or 'turns', a list of messages or texts")
    return [{"role": "user", "content": turns[0]}] if isinstance(turns[0], str) else turns
