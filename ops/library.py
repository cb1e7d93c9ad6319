"""Finds and loads the compiled library, once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

NAME = "_ops.so"


def _candidates() -> list[Path]:
    here = Path(__file__).resolve().parent
    found = [here.parent / NAME]
    spec = importlib.util.find_spec("torch_armllm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        found.append(Path(place) / NAME)
    checkout = here.parent
    found += sorted((checkout / "build").glob(f"*/{NAME}"))
    return found


def load() -> Path:
    """Loads the kernels and returns the file they came from.

    Raises:
        ImportError: the library has not been built, or was built for another architecture.
    """
    tried = _candidates()
    for path in tried:
        if path.exists():
            torch.ops.load_library(str(path))
            return path
    raise ImportError(
        "torch_armllm's compiled kernels (" + NAME + ") were not found; install the package with `pip install .` "
        "or `pip install -e .`. Looked in: " + ", ".join(str(p.parent) for p in tried)
    )
