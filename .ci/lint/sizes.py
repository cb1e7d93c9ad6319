"""Counts what makes a change cost many files, and refuses more of it than there is.

    python .ci/lint/sizes.py               prints each figure beside its limit; exit status 1 if one is higher
    python .ci/lint/sizes.py --list NAME   prints the places of a figure, such as ``parameters``
    python .ci/lint/sizes.py --root DIR    counts in another checkout, such as an older commit

Limits are what was reached: a change that lowers a figure lowers its limit, too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("torch_armllm", "ops", "passes")
KINDS = {
    "DecoderCalls",
    "GraphPlan",
    "LLMEngine",
    "LayerCalls",
    "ModuleForward",
    "ModuleRunner",
    "NativePlan",
    "PatchedModel",
    "PlanModel",
    "PlanRunner",
    "PlanScorer",
    "PoolingEngine",
    "ReplicaSet",
    "StepExecutor",
    "TextCalls",
    "TokenCalls",
}
"""Kinds of plans, runners, models and engines, which callers had better not tell apart."""


class Figure(NamedTuple):
    """A figure: text, and the most that there may be."""

    text: str
    limit: int


FIGURES = {
    "parameters": Figure("functions of 8 and more parameters", 32),
    "many-parameters": Figure("functions of 12 and more parameters", 10),
    "numbers": Figure("arguments of a graph's node by number", 11),
    "tuples": Figure("calls that pass a tuple of 3 and more by star", 0),
    "forks": Figure("isinstance of a kind of plan, runner, model or engine", 6),
}


def main(arguments: list[str]) -> int:
    """Prints the figures; returns 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", choices=FIGURES)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    options = parser.parse_args(arguments)
    found: dict[str, list[str]] = defaultdict(list)
    for top in PRODUCT:
        for path in sorted((options.root / top).rglob("*.py")):
            for name, line in places(ast.parse(path.read_text())):
                found[name].append(f"{path.relative_to(options.root)}:{line}")
    if options.list:
        print("\n".join(found[options.list]))
        return 0
    worse = False
    for name, figure in FIGURES.items():
        count = len(found[name])
        worse |= count > figure.limit
        print(f"{count:4} of at most {figure.limit:3}  {figure.text}")
    if worse:
        print("a figure is above its limit: see --list, and give the values a type of their own")
    return int(worse)


def places(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the name of a figure and a line, for each place that counts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = _parameters(node.args)
            if count >= 8:
                yield "parameters", node.lineno
            if count >= 12:
                yield "many-parameters", node.lineno
        elif isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Attribute) and node.value.attr == "args":
                yield "numbers", node.lineno
        elif isinstance(node, ast.Call):
            stars = [argument.value for argument in node.args if isinstance(argument, ast.Starred)]
            if any(isinstance(value, ast.Tuple) and len(value.elts) >= 3 for value in stars):
                yield "tuples", node.lineno
            if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                if names & KINDS:
                    yield "forks", node.lineno


def _parameters(arguments: ast.arguments) -> int:
    """Returns the number of parameters without ``self`` and ``cls``."""
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
