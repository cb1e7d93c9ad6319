"""lm-eval's tasks by name, their data found from wherever the command runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_armllm.system.extras import require_extra


def load_tasks(names: Sequence[str], include: Sequence[Path] = ()) -> dict[str, Any]:
    """Loads tasks with their data.

    Args:
        names: of tasks, groups or tags, or patterns of them.
        include: folders of further tasks.  Files that these name relatively are looked for from the working
            directory, from the folder, and from those above it.

    Returns:
        lm-eval's tasks by name, without those that groups bring twice.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: a name fits no task, or a task's data cannot be had.
    """
    require_extra("lm_eval", "eval", "evaluation")
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise ValueError(f"--include-path {folder}: there is no such folder")
    paths = [str(folder.resolve()) for folder in include]
    # the harness' own tasks are thousands of files: they are read where somebody asks for one
    manager = TaskManager(include_path=paths, include_defaults=False) if paths else None
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=paths or None)
    found: dict[str, Any] = {}
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            raise ValueError(
                f"there is no task {name!r}; local ones need --include-path{_hint(manager, name)}"
            )
        for match in matches:
            found.update(_load(manager, match))
    return found


def _hint(manager: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, manager.all_tasks, 3)
    return f"; similar ones: {', '.join(near)}" if near else ""


def _load(manager: Any, name: str) -> dict[str, Any]:
    entry = manager.task_index[name]
    if entry.kind.name == "TAG":
        return {name: task for tagged in sorted(entry.tags) for name, task in _load(manager, tagged).items()}
    place = _place(entry)
    try:
        with _working_in(place):
            tasks: dict[str, Any] = dict(manager.load([name])["tasks"])
            return tasks
    except Exception as error:
        raise ValueError(f"task {name!r}: {type(error).__name__}: {error}") from error


def _place(entry: Any) -> Path:
    """From where the files that a task names are found; the working directory where they are not."""
    files = (entry.cfg or {}).get("dataset_kwargs") or {}
    named = [Path(file) for file in _strings(files.get("data_files", []))]
    relative = [file for file in named if not file.is_absolute() and "://" not in str(file)]
    yaml = entry.yaml_path
    for place in [Path.cwd(), *(Path(yaml).resolve().parents if yaml else ())]:
        if all((place / file).exists() for file in relative):
            return place
    return Path.cwd()


def _strings(value: Any) -> Iterator[str]:
    """All strings in lists and dictionaries."""
    if isinstance(value, str):
        yield value
    else:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


@contextmanager
def _working_in(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)
