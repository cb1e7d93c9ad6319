"""The file that a comparison grows in, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_armllm.evaluation.comparison import compare
from torch_armllm.evaluation.task_results import TaskResult
from torch_armllm.system.files import atomic_file

_VERSION = 1


@dataclass
class SchemeResult:
    """All of a scheme.

    Attributes:
        bits: a weight, see `bits_of`.
        bytes: of all weights.
        tasks: that are finished.
        error: what stopped it.
    """

    bits: float | None = None
    bytes: int | None = None
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        tasks = {name: task.to_dict() for name, task in self.tasks.items()}
        return {"bits": self.bits, "bytes": self.bytes, "tasks": tasks, "error": self.error}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> SchemeResult:
        """What `to_dict` gave, without the error: it may go better now."""
        tasks = {name: TaskResult.from_dict(task) for name, task in found["tasks"].items()}
        return cls(found["bits"], found["bytes"], tasks)


class Store:
    """Results by scheme, written after every task.

    Args:
        settings: of the comparison, as JSON types; what was found with others is not mixed with them.
        file: to go on with and to write; None: nothing is written.

    Raises:
        ValueError: the file holds something else, or results of other settings.
    """

    def __init__(self, settings: Mapping[str, Any], file: Path | None = None) -> None:
        self.settings = dict(settings)
        self.schemes: dict[str, SchemeResult] = {}
        self._file = file
        self._earlier: dict[str, SchemeResult] = {}
        if file is not None and file.exists():
            self._earlier = _read(file, self.settings)

    def begin(self, scheme: str) -> SchemeResult:
        """A scheme's results, with what an earlier run found."""
        result = self._earlier.pop(scheme, None) or SchemeResult()
        self.schemes[scheme] = result
        return result

    def save(self) -> None:
        """Writes everything; a reader finds the old file or the new one."""
        if self._file is None:
            return
        content = {
            "version": _VERSION,
            "settings": self.settings,
            "table": [line.to_dict() for line in self.lines()],
            "schemes": {name: result.to_dict() for name, result in self._all().items()},
        }
        with atomic_file(self._file) as scratch:
            scratch.write_text(json.dumps(content), encoding="utf-8")

    def lines(self) -> Any:
        """The comparison of all schemes with the first one."""
        found = {name: result.tasks for name, result in self.schemes.items()}
        return compare(found, next(iter(found), ""))

    def _all(self) -> dict[str, SchemeResult]:
        return {**self.schemes, **self._earlier}


def _read(file: Path, settings: dict[str, Any]) -> dict[str, SchemeResult]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        own, schemes = found["settings"], found["schemes"]
        differing = [key for key in settings if own.get(key) != settings[key]]
        if found["version"] != _VERSION or differing:
            said = ", ".join(f"{key}: {own.get(key)} before, {settings[key]} now" for key in differing)
            raise ValueError(
                f"{file} holds results of other settings ({said}): name another file, or remove it"
            )
        return {name: SchemeResult.from_dict(scheme) for name, scheme in schemes.items()}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no file of results; name another one") from error
