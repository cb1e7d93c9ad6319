"""Files beside a model's weights, in a folder or on the model hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.source_name import check_source
from torch_armllm.system.inner_paths import check_inner_name, inner_path


def has_files(model: str) -> bool:
    """True for a folder or a hub name; False for the embedded model and for a single file."""
    path = Path(model).expanduser()
    return path.is_dir() or ("/" in model and not path.exists())


def find_file(source: str, name: str) -> Path | None:
    """Returns a file of a folder or hub name; None if it has none of that name.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if (folder := Path(source).expanduser()).exists():
        path = folder / name
        return path if path.is_file() else None
    check_source(source)
    from transformers.utils import cached_file  # imports transformers

    found = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def check_inner(source: str, name: object, where: str) -> str:
    """Returns a name that a file of a folder or hub name gives, if it stays there.

    Args:
        source: the folder or hub name.
        name: of a file or folder in it.
        where: the file that names it.

    Raises:
        ValueError: it leads elsewhere.
    """
    if (folder := Path(source).expanduser()).exists():
        inner_path(folder, name, f"{where} of {source}")
    return check_inner_name(name, f"{where} of {source}")


def read_json(source: str, name: str) -> Any:
    """Returns the content of a JSON file; None if there is none.

    Raises:
        ValueError: it is no JSON.
    """
    path = find_file(source, name)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_object(source: str, name: str) -> dict[str, Any]:
    """Returns the content of a JSON file that holds an object; an empty one if there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    content = read_json(source, name)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{name} of {source} is damaged: an object is expected, not {str(content)[:50]}")
    return content
