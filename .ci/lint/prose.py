"""Checks what ruff and clang-format do not: how docstrings begin, and how long lines are outside of Python.

    python .ci/lint/prose.py            checks all files that git tracks; exit status 1 where a rule is broken
    python .ci/lint/prose.py FILE ...   checks these

A docstring's first line says what the thing is or does, so it does not open with a question word.
Lines of C++ and Markdown and comments of shell and TOML end at 110 characters.  In Markdown, tables, links
alone on a line and fenced blocks may be longer.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPENERS = re.compile(r"(What|How|Who|Whose|Whom|Whoever|Where|When|Whether|Which|Why)\b")
WIDTH = 110
WRAPPED = (".cpp", ".h", ".c", ".sh", ".md", ".toml", ".cmake", ".yml")
EXEMPT = ("docs/models.md", "ops/schemas.cpp")
"""A table that a command writes; schemas of ops, one a line, as torch prints them."""
UNBREAKABLE = re.compile(r"\s*(\||<|!?\[.*\]\(.*\)[.,]?$|https?://\S+$|\S+$)")
"""Markdown that cannot be wrapped: table rows, HTML, a link or a word alone."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file, those below attributes included."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if (
                isinstance(statement, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield statement.lineno, value.value


def breaches(path: Path) -> Iterator[str]:
    """Every breach of the rules in a file, as ``line: text``."""
    if path.suffix == ".py":
        for line, text in docstrings(path):
            if OPENERS.match(text.lstrip()):
                yield f"{line}: docstring opens with {text.split()[0]!r}"
    elif path.suffix in WRAPPED:
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fenced ^= path.suffix == ".md" and line.lstrip().startswith("```")
            if path.suffix == ".md":
                loose = fenced or UNBREAKABLE.match(line)
            else:  # the formatter answers for C++ code; commands of shell scripts are wrapped by sense
                loose = path.suffix in (".sh", ".toml") and not line.lstrip().startswith("#")
            if len(line) > WIDTH and not loose:
                yield f"{number}: {len(line)} characters, at most {WIDTH}"


def main(files: list[str]) -> int:
    """Prints every breach; returns 1 where there is one."""
    names = files or subprocess.check_output(["git", "ls-files"], text=True, cwd=ROOT).splitlines()
    found = 0
    for name in names:
        path = ROOT / name
        if name in EXEMPT or not path.is_file():
            continue
        for breach in breaches(path):
            print(f"{name}:{breach}")
            found += 1
    print(f"{found} breaches of the rules of prose")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
