"""Files of a split GGUF: their names, by the name of any one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: str) -> str:
    """Returns the part of a split file that holds the header; every other file as it is."""
    file = Path(path)
    found = _NAME.fullmatch(file.name)
    first = None if found is None else file.with_name(f"{found['stem']}-00001-of-{found['count']}.gguf")
    return str(first) if first is not None and first.is_file() else path


def part_paths(path: str, fields: Mapping[str, Any]) -> list[str]:
    """Returns the paths of all parts, in order; of a file that is not split, its own.

    Args:
        path: any of the parts.
        fields: the fields of its header.

    Raises:
        ValueError: the file is a part, and its name does not say which, or another part is missing.
    """
    field = fields.get("split.count")
    count = 1 if field is None else field.contents()
    if not isinstance(count, int) or count <= 1:
        return [path]
    file = Path(path)
    found = _NAME.fullmatch(file.name)
    if found is None or int(found["count"]) != count:
        raise ValueError(
            f"{path} is one of {count} parts of a split GGUF file, and its name does not end with "
            f"-00001-of-{count:05}.gguf, or another number, by which the others are found: rename all parts "
            "so, or join them with llama.cpp's llama-gguf-split --merge"
        )
    names = [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not file.with_name(name).is_file()]
    if missing:
        raise ValueError(
            f"{path} is one of {count} parts of a split GGUF file, and {', '.join(missing)} is missing in "
            f"{file.parent}: download all parts into one folder"
        )
    return [str(file.with_name(name)) for name in names]
