"""Checks that C++ files of ``ops/`` include their own folder or a lower row, and that headers form no circle.

    python .ci/lint/includes.py            exit status 1 where the order is broken
    python .ci/lint/includes.py ROOT       checks the ``ops`` folder of another checkout

``docs/contributing.md`` has the same rows in prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROWS = (
    ("simd", "dispatch", "runtime"),
    ("norm", "rope", "activation", "pointwise", "recurrent", "collective"),
    ("linear", "lora"),
    ("embedding", "attention", "moe"),
    ("mla", "select", "sample", "compress", "rounding"),
    ("plan",),
    ("",),  # files at the root of ops: the table of schemas
)
"""Folders of ``ops``, the lowest row first."""
ROW = {folder: number for number, row in enumerate(ROWS) for folder in row}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def includes(ops: Path) -> dict[str, set[str]]:
    """Files below ``ops`` that each C++ file includes; paths are relative to ``ops``."""
    files = {
        path.relative_to(ops).as_posix(): path
        for suffix in ("h", "cpp", "def")
        for path in sorted(ops.rglob(f"*.{suffix}"))
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        folder = Path(name).parent
        found[name] = {
            candidate
            for included in INCLUDE.findall(path.read_text())
            for candidate in ((folder / included).as_posix(), included)
            if candidate in files
        }
    return found


def folder_of(name: str) -> str:
    """First folder of a path below ``ops``; empty for a file at its root."""
    return name.split("/")[0] if "/" in name else ""


def breaches(graph: dict[str, set[str]]) -> Iterator[str]:
    """Every breach of the order, as a line of text."""
    for name, included in graph.items():
        folder = folder_of(name)
        if folder not in ROW:
            yield f"ops/{name}: the folder {folder!r} has no row in .ci/lint/includes.py"
            continue
        for other in sorted(included):
            target = folder_of(other)
            if target != folder and ROW.get(target, len(ROWS)) >= ROW[folder]:
                yield f"ops/{name} includes {other}: {target} is not below {folder}"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"circle: {' -> '.join(error.args[1])}"


def main(arguments: list[str]) -> int:
    """Prints every breach; returns 1 where there is one."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2]
    graph = includes(root / "ops")
    lines = list(breaches(graph))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(graph)} C++ files, {sum(map(len, graph.values()))} includes: {len(lines)} against the order")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
