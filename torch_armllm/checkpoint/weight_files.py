"""The files that hold a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

SAFETENSORS = ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),)
"""The index of several safetensors files, and the only one."""
ALL_KINDS = (*SAFETENSORS, (WEIGHTS_INDEX_NAME, WEIGHTS_NAME))
"""The same, and that of pickled tensors."""


def weight_files(source: str, kinds: tuple[tuple[str, str], ...] = ALL_KINDS) -> list[Path]:
    """Returns the files that hold a checkpoint's weights: those that transformers reads.

    Where there is one file beside an index, the index is of another version, and the file counts.

    Args:
        source: a folder or a hub name.
        kinds: the kinds of files that are looked for, in this order.

    Raises:
        ValueError: there are none, or the index names a file that is missing.
    """
    for index_name, single in kinds:
        if (file := find_file(source, single)) is not None:
            return [file]
        if (index := find_file(source, index_name)) is not None:
            names = sorted(set(read_index(index)["weight_map"].values()))
            files = {name: find_file(source, name) for name in names}
            missing = [name for name, file in files.items() if file is None]
            if missing:
                raise ValueError(f"{missing[0]} is named in {index_name} and missing: download it again")
            return [file for file in files.values() if file is not None]
    if files_without_index := sorted(Path(source).glob("*.safetensors")):
        return files_without_index
    raise ValueError(f"there is no {SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}")


def read_index(file: Path) -> dict[str, Any]:
    """Returns the content of an index.

    Raises:
        ValueError: it does not name a file in its own folder for each tensor.
    """
    try:
        index: Any = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): copy or download it again") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{file} has no weight_map with a file for each tensor: copy or download it again")
    for name, place in places.items():
        if not isinstance(place, str) or Path(place).name != place or place == "..":
            raise ValueError(
                f"weight_map in {file} has {place!r} for {name}, and the name of a file is expected"
            )
    return dict(index)


def find_file(source: str, name: str) -> Path | None:
    """Returns a file of a folder or hub name; None if there is none."""
    path: str | None = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)
