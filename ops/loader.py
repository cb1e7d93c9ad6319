"""Loading of the compiled library."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch

NAME = "_ops.so"
OVERRIDE = "ARMLLM_LIBRARY"


def _candidates() -> list[Path]:
    """Returns possible locations of the library, best first; a checkout uses any build that it finds."""
    forced = os.environ.get(OVERRIDE)
    if forced:
        return [Path(forced)]
    beside = Path(__file__).resolve().parent.parent
    installed = [Path(place) / "torch_armllm" for place in sys.path]
    # Not every build/*: it may also hold builds for other processors.
    built = sorted((beside / "build").glob(f"*linux_{platform.machine()}"))
    return list(dict.fromkeys(place / NAME for place in [beside, *installed, *built]))


def load() -> Path:
    """Loads the kernels and returns the file they came from.

    The environment variable ``ARMLLM_LIBRARY`` names another build of them, such as one with sanitizers.

    Raises:
        ImportError: the library has not been built.
        OSError: it was built for another architecture, or for a torch older than 2.10.
    """
    tried = _candidates()
    for path in tried:
        if path.exists():
            torch.ops.load_library(str(path))
            return path
    raise ImportError(
        f"torch_armllm's compiled kernels ({NAME}) were not found; install the package with `pip install .` "
        "or `pip install -e .`. Looked in: " + ", ".join(str(path.parent) for path in tried)
    )
