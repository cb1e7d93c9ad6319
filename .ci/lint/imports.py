"""Counts imports against the order of the layers, circles, and imports inside functions.

    python .ci/lint/imports.py              checks this checkout; exit status 1 where a rule is broken
    python .ci/lint/imports.py --root DIR   checks another one

The layers are those of pyproject.toml, and every module has one.  All imports count: top-level ones,
those for typing alone, and those in functions.  An import inside a function is allowed only in the files of
`FUNCTION_LEVEL`, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torch_armllm"
FUNCTION_LEVEL = {
    "torch_armllm/__init__.py": "public names are imported at first use: transformers takes seconds",
    "torch_armllm/cli/*.py": "`--help` answers without importing torch",
    "torch_armllm/transformers_plugin/*.py": "runs while transformers' own registry is being imported",
    "torch_armllm/llm/ranks/loader.py": "ray is an optional package",
    "ops/variants.py": "triton is an optional package, and imported where its variant is selected",
    **dict.fromkeys(
        (
            "torch_armllm/checkpoint/bundled_model.py",
            "torch_armllm/llm/loading/loader.py",
            "torch_armllm/llm/loading/cached_loader.py",
            "torch_armllm/llm/ranks/rank_shard.py",
            "torch_armllm/llm/replicas/loader.py",
            "torch_armllm/llm/plan_cache/cache.py",
            "torch_armllm/engine/assembly/computing.py",
            "torch_armllm/engine/images/build.py",
            "torch_armllm/patching/lm_head.py",
            "torch_armllm/patching/patched_model.py",
            "torch_armllm/engine/speculative/build.py",
        ),
        "an engine of a cached plan starts without transformers, which takes seconds to import",
    ),
}
"""Files that may import our own modules inside functions, and why."""


class Import(NamedTuple):
    """One import of one of our modules."""

    importer: str
    imported: str
    in_function: bool
    line: int


def modules(root: Path) -> dict[str, Path]:
    """The files of the package by module name, as installed: `ops` and `passes` lie inside the package."""
    found = {}
    for folder, prefix in ((PACKAGE, PACKAGE), ("ops", f"{PACKAGE}.ops"), ("passes", f"{PACKAGE}.passes")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((prefix, *parts))] = path
    return found


def imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """All imports of our own modules in a file, one for each imported module and line."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            if isinstance(child, ast.Import):
                names = {alias.name for alias in child.names}
            elif isinstance(child, ast.ImportFrom) and child.module:
                full = {alias.name: f"{child.module}.{alias.name}" for alias in child.names}
                names = {full[name] if full[name] in known else child.module for name in full}
            else:
                names = set()
            yield from (Import(module, n, inside, child.lineno) for n in sorted(names) if n in known)
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text()), False)


def layers() -> dict[str, int]:
    """The number of each top-level module's layer, from the bottom."""
    rows = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["layers"]["order"]
    return {name.strip(): number for number, row in enumerate(reversed(rows)) for name in row.split("|")}


def is_upward(edge: Import, numbers: dict[str, int]) -> bool:
    """True for an import of a higher layer, of a sibling, or of the package itself."""
    if edge.importer == PACKAGE or edge.imported == PACKAGE:
        return edge.importer != PACKAGE
    low, high = (module.split(".")[1] for module in (edge.importer, edge.imported))
    return low != high and numbers[high] >= numbers[low]


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not (Tarjan's strongly connected components)."""
    graph: dict[str, list[str]] = {}
    for importer, imported in edges:
        graph.setdefault(importer, []).append(imported)
        graph.setdefault(imported, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def connect(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in graph[node]:
            if following not in index:
                connect(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            connect(node)
    return groups


def main(arguments: list[str]) -> int:
    """Prints the three figures and every breach; returns 1 where there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    root = parser.parse_args(arguments).root
    known, numbers = modules(root), layers()
    if loose := {module.split(".")[1] for module in known if module != PACKAGE} - numbers.keys():
        print(f"modules without a layer in pyproject.toml: {', '.join(sorted(loose))}")
        return 1
    found = [edge for module, path in known.items() for edge in imports_of(module, path, known)]
    upward = [edge for edge in found if is_upward(edge, numbers)]
    groups = circles({(e.importer, e.imported) for e in found if e.importer not in (e.imported, PACKAGE)})
    inside = [edge for edge in found if edge.in_function]
    names = {edge: known[edge.importer].relative_to(root).as_posix() for edge in inside}
    stray = [e for e in inside if not any(fnmatchcase(names[e], pattern) for pattern in FUNCTION_LEVEL)]
    print(
        f"{len(known)} modules, {len(found)} imports: {len(upward)} upward, {len(groups)} circles, "
        f"{len(inside)} inside functions ({len(stray)} of them without a reason)"
    )
    for name, edges in (("upward", upward), ("inside a function", stray)):
        for edge in edges:
            print(f"{known[edge.importer]}:{edge.line}: {name}: {edge.imported}")
    for group in groups:
        print(f"circle of {len(group)}: {', '.join(group)}")
    return 1 if upward or groups or stray else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
