"""The JSON file of a comparison's results, from which an interrupted comparison resumes."""

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
class VariantResult:
    """The results of a variant.

    Attributes:
        bits: bits per weight, see `bits_of`.
        bytes: bytes of all weights.
        tasks: results of the finished tasks.
        error: the error that stopped it.
    """

    bits: float | None = None
    bytes: int | None = None
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        tasks = {name: task.to_dict() for name, task in self.tasks.items()}
        return {"bits": self.bits, "bytes": self.bytes, "tasks": tasks, "error": self.error}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> VariantResult:
        """Restores a result of `to_dict`, without the error: the next run may succeed."""
        tasks = {name: TaskResult.from_dict(task) for name, task in saved["tasks"].items()}
        return cls(saved["bits"], saved["bytes"], tasks)


class ResultsFile:
    """Results by variant, written after every task.

    Args:
        settings: settings of the comparison, as JSON types; results of other settings are refused.
        file: the file to resume from and to write; None: nothing is written.

    Raises:
        ValueError: the file holds something else, or results of other settings.
    """

    def __init__(self, settings: Mapping[str, Any], file: Path | None = None) -> None:
        self.settings = dict(settings)
        self.variants: dict[str, VariantResult] = {}
        self._file = file
        self._earlier: dict[str, VariantResult] = {}
        if file is not None and file.exists():
            self._earlier = _read(file, self.settings)

    def begin(self, variant: str) -> VariantResult:
        """Returns the results of a variant, with those of an earlier run."""
        result = self._earlier.pop(variant, None) or VariantResult()
        self.variants[variant] = result
        return result

    def has_comparison(self, variant: str, task: str) -> bool:
        """True if a variant's distributions on a text were compared with the baseline's."""
        result = self._all().get(variant)
        return result is not None and task in result.tasks and bool(result.tasks[task].distributions)

    def save(self) -> None:
        """Writes everything, atomically."""
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
        """Compares all variants with the first one."""
        tasks = {name: result.tasks for name, result in self.variants.items()}
        return compare(tasks, next(iter(tasks), ""))

    def _all(self) -> dict[str, VariantResult]:
        return {**self.variants, **self._earlier}


def _read(file: Path, settings: dict[str, Any]) -> dict[str, VariantResult]:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        own, schemes = saved["settings"], saved["schemes"]
        differing = [key for key in settings if own.get(key) != settings[key]]
        if saved["version"] != _VERSION or differing:
            differences = ", ".join(f"{key}: {own.get(key)} before, {settings[key]} now" for key in differing)
            raise ValueError(
                f"{file} holds results of other settings ({differences}): name another file, or remove it"
            )
        return {name: VariantResult.from_dict(scheme) for name, scheme in schemes.items()}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a results file: name another one") from error
