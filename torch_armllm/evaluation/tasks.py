"""Loading of lm-eval's tasks by name, whatever the working directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_armllm.system.extras import require_extra


def load_tasks(
    names: Sequence[str], include: Sequence[Path] = (), run_unsafe_code: bool = False
) -> dict[str, Any]:
    """Loads tasks with their data.

    Args:
        names: names or patterns of tasks, groups or tags.
        include: folders of further tasks.  Relative data files are searched in the working directory, in the
            task's folder, and in its parents.
        run_unsafe_code: accepts tasks that execute code which the model writes.

    Returns:
        lm-eval's tasks by name, without duplicates.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: a name matches no task, a task's data cannot be loaded, or a task executes what the model
            writes and that was not accepted.
    """
    require_extra("lm_eval", "eval", "evaluation")
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise ValueError(f"--include-path {folder}: there is no such folder")
    paths = [str(folder.resolve()) for folder in include]
    # lm-eval's own tasks are thousands of files: they are indexed only if a requested name needs them
    manager = TaskManager(include_path=paths, include_defaults=False) if paths else None
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=paths or None)
    tasks: dict[str, Any] = {}
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            raise ValueError(
                f"there is no task {name!r}; local ones need --include-path{_hint(manager, name)}"
            )
        for match in matches:
            tasks.update(_load(manager, match))
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not run_unsafe_code:
        raise ValueError(
            f"{', '.join(unsafe)}: these tasks execute code that the model writes; if this machine may run "
            "it, add --confirm-run-unsafe-code"
        )
    return tasks


def _hint(manager: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, manager.all_tasks, 3)
    return f"; similar ones: {', '.join(near)}" if near else ""


def _load(manager: Any, name: str) -> dict[str, Any]:
    entry = manager.task_index[name]
    if entry.kind.name == "TAG":
        return {name: task for tagged in sorted(entry.tags) for name, task in _load(manager, tagged).items()}
    folder = _data_folder(entry)
    try:
        with _working_in(folder):
            tasks: dict[str, Any] = dict(manager.load([name])["tasks"])
            return tasks
    except Exception as error:
        raise ValueError(f"task {name!r}: {type(error).__name__}: {error}") from error


def _data_folder(entry: Any) -> Path:
    """Returns the folder that a task's data files are relative to; else the working directory."""
    files = (entry.cfg or {}).get("dataset_kwargs") or {}
    named = [Path(file) for file in _strings(files.get("data_files", []))]
    relative = [file for file in named if not file.is_absolute() and "://" not in str(file)]
    yaml = entry.yaml_path
    for folder in [Path.cwd(), *(Path(yaml).resolve().parents if yaml else ())]:
        if all((folder / file).exists() for file in relative):
            return folder
    return Path.cwd()


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    else:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
