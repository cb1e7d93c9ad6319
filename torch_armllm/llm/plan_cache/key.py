"""Cache keys: everything that a cached plan depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_armllm.hf.names import METHOD
from torch_armllm.ops import LIBRARY_PATH, variants

_FORMAT = 5
"""Version of the entry format; part of the key, so a new version never reads old entries."""
_SIBLINGS = ("ops", "passes")
"""Folders inside the installed package, and next to it in a checkout."""

PlanKey = dict[str, Any]


def plan_key(source: str, options: Mapping[str, Any]) -> PlanKey | None:
    """Returns the key of a checkpoint's plan; None if its folder has no packed weights of this package.

    A plan depends on all files of the folder, on the loading options, on the versions of Python, torch and
    transformers, on this package's own files, on the kernels, and on its environment variables.

    Args:
        source: the checkpoint's folder.
        options: loading options that affect the plan, as JSON.
    """
    folder = Path(source).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
        method = (config.get("quantization_config") or {}).get("quant_method")
    except (OSError, ValueError, AttributeError):
        return None
    if method != METHOD:
        return None
    return {
        "format": _FORMAT,
        "folder": str(folder.resolve()),
        "files": stamps(sorted(path for path in folder.iterdir() if path.is_file())),
        "options": dict(options),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": sys.version,
        "package": _digest(stamps(_own_files())),
        "kernels": variants.machine().compiled,
        "settings": {name: v for name, v in sorted(os.environ.items()) if name.startswith("ARMLLM_")},
    }


def stamps(files: Iterable[Path]) -> list[list[Any]]:
    """Returns path, size, modification time and inode of each file."""
    return [[str(f), (state := f.stat()).st_size, state.st_mtime_ns, state.st_ino] for f in files]


def entry_name(key: PlanKey) -> str:
    """Returns the file name of a key's entry."""
    return _digest(key)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _own_files() -> list[Path]:
    """Returns the package's Python files, in a checkout or installed, and its compiled library."""
    package = Path(__file__).resolve().parents[2]
    files = {LIBRARY_PATH}
    for root in (package, *(package.parent / name for name in _SIBLINGS)):
        files.update(root.rglob("*.py"))
    return sorted(files)
