"""Kernel variants: what this CPU can run and what is in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Choice:
    """The kernel variant that a family of ops runs."""

    variant: str
    why: str
    """The instructions that do its work, and why each better variant is not in use."""


@dataclass(frozen=True)
class Machine:
    """This machine as the kernels see it."""

    features: tuple[str, ...]
    variants: tuple[str, ...]
    """Built for this architecture, best first."""
    runnable: tuple[str, ...]
    """Those of them that this CPU can run."""
    selected: str
    families: dict[str, Choice]
    """The variants in use, by family of ops: ``linear``, ``attention``, …"""
    tables: dict[str, dict[str, str]]
    """``tables[variant][family]``: whose kernels that variant uses; not every variant has its own."""
    sve_bits: int
    """Length of the vectors of SVE, 0 without."""
    sme_bits: int
    """The same in SME's streaming mode."""

    def distinct(self, *families: str) -> tuple[str, ...]:
        """Runnable variants that differ in the kernels of ``families``: what is worth testing.

        Args:
            families: such as ``"linear"``; none given: all.
        """
        seen: dict[tuple[str, ...], str] = {}
        for name in self.runnable:
            table = self.tables[name]
            seen.setdefault(tuple(table[family] for family in families or table), name)
        return tuple(seen.values())


def machine() -> Machine:
    """Describes the CPU's features and the kernel variants."""
    found = json.loads(torch.ops.armllm.isa_list())
    found["families"] = {family: Choice(**choice) for family, choice in found["families"].items()}
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return Machine(**arguments)


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
