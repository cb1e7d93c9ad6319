"""The registered fuzz targets.

A target is a function that takes a seed, derives one input from it, and raises on a finding: an error that
no one could act on, a wrong answer.  The driver sees by itself that a process died or stopped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

Target = Callable[[int], None]

TARGETS = {
    f"checkpoint-{kind}": f"tests.fuzz.checkpoints.target:{kind}"
    for kind in (
        "saved",
        "experts",
        "gptq",
        "awq",
        "awq_gemv",
        "compressed_tensors",
        "torchao",
        "mxfp4",
        "gguf",
        "floats",
    )
} | {
    "ops": "tests.fuzz.ops.target:run",
    "plans": "tests.fuzz.ops.plans:run",
    "scheduler": "tests.fuzz.serving.scheduler:run",
    "text": "tests.fuzz.serving.text:run",
    "grammars": "tests.fuzz.serving.grammars:run",
    "http": "tests.fuzz.serving.http:run",
    "outputs": "tests.fuzz.serving.outputs:run",
    "templates": "tests.fuzz.serving.outputs:templates",
}
"""Targets by name: the module and the function; more are added as ``TARGETS[name] = "module:function"``."""


def target_named(name: str) -> Target:
    """Imports a target of the table, or any other as ``module:function``."""
    module, _, function = TARGETS.get(name, name).partition(":")
    found: Target = getattr(importlib.import_module(module), function)
    return found
