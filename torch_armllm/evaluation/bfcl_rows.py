"""Rows of the Berkeley Function Calling Leaderboard: questions, functions and the calls that are right."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
"""Single turns that the AST checker judges, or that call nothing."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""JSON schema's names of the types that BFCL calls by Python's."""


@dataclass(frozen=True)
class BfclRow:
    """A question.

    Attributes:
        id: its name in BFCL.
        messages: in OpenAI's form.
        functions: that may be called, in BFCL's form.
        answers: the right calls, each with the values that are taken of every argument; empty: none is right.
    """

    id: str
    messages: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    answers: list[dict[str, Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions as tools of OpenAI's API, whose names have no dots."""
        return [
            {
                "type": "function",
                "function": {
                    **function,
                    "name": function["name"].replace(".", "_"),
                    "parameters": _json_schema(function["parameters"]),
                },
            }
            for function in self.functions
        ]


def read_rows(category: str, folders: Sequence[Path] = ()) -> list[BfclRow]:
    """Reads the rows of a category.

    Args:
        category: one of `CATEGORIES`.
        folders: where to search ``data/bfcl_CATEGORY.jsonl``, as in their parents and in the working folder.

    Returns:
        The rows of the first such file; else those of the package bfcl-eval.

    Raises:
        ValueError: there are none.
    """
    name = Path("data") / f"bfcl_{category}.jsonl"
    for folder in (Path.cwd(), *(each for path in folders for each in (path, *path.resolve().parents))):
        if (folder / name).is_file():
            return [
                BfclRow(row["id"], row["messages"], row["functions"], row["ground_truth"])
                for row in _lines(folder / name)
            ]
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"there are no rows of bfcl_{category}: install them by pip install --no-deps bfcl-eval, or name "
            f"a folder with {name} by --include-path"
        )
    data, file = Path(spec.submodule_search_locations[0]) / "data", f"BFCL_v4_{category}.json"
    answers = data / "possible_answer" / file
    right = {row["id"]: row["ground_truth"] for row in _lines(answers)} if answers.is_file() else {}
    return [
        BfclRow(row["id"], row["question"][0], row["function"], right.get(row["id"], []))
        for row in _lines(data / file)
    ]


def _lines(file: Path) -> list[dict[str, Any]]:
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _json_schema(schema: Any) -> Any:
    """Returns a schema with JSON schema's names of types."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    renamed = {name: _json_schema(value) for name, value in schema.items() if name != "properties"}
    if isinstance(properties := schema.get("properties"), Mapping):  # one of them may be called "type"
        renamed["properties"] = {name: _json_schema(value) for name, value in properties.items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        renamed["type"] = _TYPES.get(kind, kind)
        if renamed["type"] is None:
            del renamed["type"]
    return renamed
