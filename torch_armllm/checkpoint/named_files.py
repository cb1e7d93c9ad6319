"""Files that other files of a checkpoint name; transformers joins some names to the folder without a look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.weight_files import ALL_KINDS, find_file, read_index
from torch_armllm.system.inner_paths import check_inner_name

_TOKENIZER = "tokenizer_config.json"


def check_named_files(source: str) -> None:
    """Checks that the files of a folder or hub name lead to no file elsewhere.

    Args:
        source: the folder or hub name.

    Raises:
        ValueError: the index of the weights or the configuration of the tokenizer names a file elsewhere.
    """
    for index_name, single in ALL_KINDS:
        if find_file(source, single) is not None:  # which transformers prefers
            break
        if (index := find_file(source, index_name)) is not None:
            read_index(index)
            break
    check_tokenizer_names(source)


def check_tokenizer_names(source: str) -> None:
    """Checks the configuration of a tokenizer; see `check_named_files`."""
    file = find_file(source, _TOKENIZER)
    fields = {} if file is None else _json(file)
    where = f"{_TOKENIZER} of {source}"
    for name in _list(fields.get("fast_tokenizer_files")):
        check_inner_name(name, f"fast_tokenizer_files in {where}")
    for template in _list(fields.get("chat_template")):  # each becomes a file where the tokenizer is saved
        if isinstance(template, dict) and (name := str(template.get("name", ""))) != Path(name).name:
            raise ValueError(f"chat_template in {where} has the name {name!r}, which is no name of a file")


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # transformers says so
        return {}
    return content if isinstance(content, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
