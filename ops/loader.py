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
    """Possible locations of the library, in order of preference; a checkout uses the first build it finds."""
    forced = os.environ.get(OVERRIDE)
    if forced:
        return [Path(forced)]
    root = Path(__file__).resolve().parent.parent
    installed = [Path(folder) / "torch_armllm" for folder in sys.path]
    # Only this machine's builds: build/ may also hold builds for other processors.
    built = sorted((root / "build").glob(f"*linux_{platform.machine()}"))
    return list(dict.fromkeys(folder / NAME for folder in [root, *installed, *built]))


def load() -> Path:
    """Loads the compiled library and returns its path.

    The environment variable ``ARMLLM_LIBRARY`` selects another build, such as a build with sanitizers.

    Raises:
        ImportError: the library has not been built.
        OSError: the library was built for another architecture, or torch is older than 2.10.
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
