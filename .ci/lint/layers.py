"""Runs import-linter over the package as it is installed: `ops` and `passes` inside it.

    python .ci/lint/layers.py      exit status 1 where the contract of pyproject.toml is broken

The copy lies in a temporary folder.  An editable installation would redirect imports to the checkout, so its
finder is taken out of this process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torch_armllm"


def main() -> int:
    """Copies the package, and returns 0 where its imports keep the contract."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    assert PathFinder in sys.meta_path
    with tempfile.TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns("__pycache__", "*.cpp", "*.h", "*.so")
        shutil.copytree(ROOT / PACKAGE, Path(folder, PACKAGE), ignore=ignore)
        for inner in ("ops", "passes"):
            shutil.copytree(ROOT / inner, Path(folder, PACKAGE, inner), ignore=ignore)
        os.chdir(folder)
        sys.path.insert(0, folder)
        status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
        os.chdir(ROOT)
    return 0 if status == EXIT_STATUS_SUCCESS else 1


if __name__ == "__main__":
    sys.exit(main())
