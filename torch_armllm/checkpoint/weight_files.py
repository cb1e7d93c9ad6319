"""The files that hold a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path

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
    """Returns the files that hold a checkpoint's weights.

    Args:
        source: a folder or a hub name.
        kinds: the kinds of files that are looked for, in this order.

    Raises:
        ValueError: there are none, or the index names a file that is missing.
    """
    for index_name, single in kinds:
        index = _file(source, index_name)
        if index is not None:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = {name: _file(source, name) for name in names}
            missing = [name for name, file in files.items() if file is None]
            if missing:
                raise ValueError(f"{missing[0]} is named in {index_name} and missing: download it again")
            return [file for file in files.values() if file is not None]
        file = _file(source, single)
        if file is not None:
            return [file]
    if files_without_index := sorted(Path(source).glob("*.safetensors")):
        return files_without_index
    raise ValueError(f"there is no {SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}")


def _file(source: str, name: str) -> Path | None:
    found: str | None = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
