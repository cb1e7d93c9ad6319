"""Reads and writes cache entries: one safetensors file each, with key and description as its metadata."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_armllm.llm.plan_cache.key import PlanKey, entry_name
from torch_armllm.system.files import atomic_file, cache_folder
from torch_armllm.system.own_files import UntrustedFileError, check_own_file, check_own_folder

_MAX_ENTRIES = 64
"""Number of entries; older ones are deleted."""
_ABANDONED = 3600.0
"""Seconds after which a scratch file belongs to a process that was killed."""


def folder() -> Path:
    """Returns the folder of all entries: ``$XDG_CACHE_HOME/torch_armllm/plans``, ``~/.cache`` by default."""
    return cache_folder() / "plans"


def _path(key: PlanKey) -> Path:
    return folder() / f"{entry_name(key)}.safetensors"


def _digest(metadata: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(metadata.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(key: PlanKey, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes an entry atomically, and deletes the oldest beyond the limit and what killed processes left.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder().mkdir(parents=True, exist_ok=True)
    check_own_folder(folder(), may_be_link=True)
    text = json.dumps({"key": key, **metadata})
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with atomic_file(_path(key), shared=True) as scratch:
        try:
            save_file(copies, scratch, {"entry": text, "sha256": _digest(text, copies)})
        except SafetensorError as error:  # of a full disk
            raise OSError(f"{_path(key)} cannot be written: {error}") from error
    _clean()


def _clean() -> None:
    """Deletes the oldest entries beyond the limit, and old scratch files."""
    entries = []
    for path in folder().iterdir():
        with suppress(OSError):  # other processes clean, too; a folder is nobody's entry
            time_ns = path.lstat().st_mtime_ns
            if path.suffix == ".safetensors":
                entries.append((time_ns, path))
            elif time_ns < time.time_ns() - _ABANDONED * 1e9:
                path.unlink()
    for _, old in sorted(entries)[:-_MAX_ENTRIES]:
        old.unlink(missing_ok=True)


def read(key: PlanKey) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Returns the metadata and tensors of the key's entry; None if there is no entry.

    Raises:
        ValueError: the entry is damaged, or not this user's own.
    """
    path = _path(key)
    try:
        check_own_folder(path.parent, may_be_link=True)
        check_own_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFileError as error:
        raise ValueError(f"{error.filename} is not read, as {error.strerror}: remove it") from None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    text = header.get("entry", "")
    if header.get("sha256") != _digest(text, tensors):
        raise ValueError(f"{path} is damaged: its checksum differs")
    metadata: dict[str, Any] = json.loads(text)
    if metadata.pop("key") != json.loads(json.dumps(key)):
        raise ValueError(f"{path} belongs to another key")
    return metadata, tensors
