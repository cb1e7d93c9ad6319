"""Kernel variants: what this CPU can run and what is in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What the kernels see of this machine."""

    features: tuple[str, ...]
    variants: tuple[str, ...]
    """Built for this architecture, best first."""
    runnable: tuple[str, ...]
    """Those of them that this CPU can run."""
    selected: str


def machine() -> Machine:
    """Describes the CPU's features and the kernel variants."""
    found = json.loads(torch.ops.armllm.isa_list())
    return Machine(
        tuple(found["features"]), tuple(found["variants"]), tuple(found["runnable"]), found["selected"]
    )


def select(name: str) -> str:
    """Uses the kernel variant ``name`` from now on (``""``: the default) and returns the one in use.

    Raises:
        RuntimeError: the name is unknown or the CPU lacks what it needs; the message lists what there is.
    """
    chosen: str = torch.ops.armllm.isa_select(name)
    return chosen


@contextmanager
def use(name: str) -> Iterator[str]:
    """Runs a block with another kernel variant."""
    before = machine().selected
    try:
        yield select(name)
    finally:
        select(before)
