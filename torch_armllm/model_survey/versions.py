"""The tables of model families under several versions of transformers, merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_armllm.model_survey.media import TAKEN

_ABSENT = "absent"
"""The result of a family that a version does not have."""


def read_tables(given: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each version.

    Args:
        given: ``VERSION=FILE`` each, where ``torch-armllm models --json`` wrote the file.

    Raises:
        ValueError: one is none, or its file holds no such table.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for each in given:
        version, _, path = each.partition("=")
        if not version or not path:
            raise ValueError(f"{each!r} is not VERSION=FILE, such as 5.24.0=models.json")
        try:
            rows = json.loads(Path(path).read_text(encoding="utf-8"))
            tables[version] = [
                {**row, "key": (row["family"], row["reach"]), "runs": row["runs"]} for row in rows
            ]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no table of `torch-armllm models --json`: {error}") from error
    return tables


def differing(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a table in Markdown with the families that differ between versions, and a column for each.

    Args:
        tables: of `read_tables`.
    """
    results = {version: {row["key"]: _result(row) for row in rows} for version, rows in tables.items()}
    keys = dict.fromkeys(key for found in results.values() for key in found)
    lines = [f"| family | kind | {' | '.join(results)} |", f"|---|---|{'---|' * len(results)}"]
    same = 0
    for family, reach in keys:
        cells = [found.get((family, reach), _ABSENT) for found in results.values()]
        if len(set(cells)) == 1:
            same += 1
        else:
            lines.append(f"| `{family}` | {reach} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(keys) - same} of {len(keys)} families differ."])


def _result(row: Mapping[str, Any]) -> str:
    taken = [name for name, answer in row.get("media", {}).items() if answer == TAKEN]
    return ", ".join([row["runs"], *taken])
