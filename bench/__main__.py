"""Cases by name: ``python -m bench --list``, ``python -m bench NAME --help``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.case import run

HERE = Path(__file__).parent


def cases() -> dict[str, Path]:
    """Returns the files of all cases: those that run a function of their own name, or of their folder's."""
    files = {
        path.parent.name if path.stem == "__main__" else path.stem: path
        for path in sorted(HERE.rglob("*.py"))
    }
    return {name: path for name, path in files.items() if f"\n    run({name})\n" in path.read_text()}


def main(arguments: Sequence[str]) -> None:
    """Lists the cases, or runs one."""
    found = cases()
    if not arguments or arguments[0] in ("--list", "--help", "-h"):
        print(__doc__, *(f"{name:20} {_title(path)}" for name, path in found.items()), sep="\n")
        return
    name, *options = arguments
    if name not in found:
        raise SystemExit(f"there is no case {name!r}, only {', '.join(found)}")
    module = ".".join(found[name].relative_to(HERE.parent).with_suffix("").parts)
    run(getattr(import_module(module), name), options)


def _title(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    main(sys.argv[1:])
