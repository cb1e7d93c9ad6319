"""What a kept plan depends on."""

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

_FORMAT = 1
"""Of entries; another one is another key."""
_BESIDE = ("ops", "passes")
"""Folders that lie inside the installed package, and beside it in a checkout."""

PlanKey = dict[str, Any]


def plan_key(source: str, asked: Mapping[str, Any]) -> PlanKey | None:
    """The key of a checkpoint's plan; None where its folder holds no packed weights of this package.

    A plan depends on every file of the folder, on how it is asked for, on the versions and the very files of
    this package, on the kernels, and on this package's settings in the environment.

    Args:
        source: the checkpoint's folder.
        asked: everything else that decides what is loaded, as JSON.
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
        "asked": dict(asked),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": sys.version,
        "package": _digest(stamps(_own_files())),
        "kernels": variants.machine().selected,
        "settings": {name: v for name, v in sorted(os.environ.items()) if name.startswith("ARMLLM_")},
    }


def stamps(files: Iterable[Path]) -> list[list[Any]]:
    """Name, size and time of the last change of each file."""
    return [[str(f), (state := f.stat()).st_size, state.st_mtime_ns, state.st_ino] for f in files]


def entry_name(key: PlanKey) -> str:
    """A file name for a key."""
    return _digest(key)


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _own_files() -> list[Path]:
    """This package's Python files, in a checkout or installed, and its compiled library."""
    package = Path(__file__).resolve().parents[2]
    found = {LIBRARY_PATH}
    for root in (package, *(package.parent / name for name in _BESIDE)):
        found.update(root.rglob("*.py"))
    return sorted(found)
