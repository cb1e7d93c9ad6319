"""Kernel variants: those that this CPU can run, and the selected variant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Choice:
    """The kernel variant that a family of ops uses."""

    variant: str
    why: str
    """The instructions that it uses, and the reason why each better variant is not in use."""


@dataclass(frozen=True)
class Machine:
    """The CPU's features, and the kernel variants that are built, runnable and selected."""

    features: tuple[str, ...]
    variants: tuple[str, ...]
    """Variants built for this architecture, best first."""
    runnable: tuple[str, ...]
    """The subset of ``variants`` that this CPU can run."""
    selected: str
    families: dict[str, Choice]
    """The variants in use, by family of ops: ``linear``, ``attention``, …"""
    tables: dict[str, dict[str, str]]
    """``tables[variant][family]`` is the variant that provides the kernels: itself or a base."""
    sve_bits: int
    """SVE vector length in bits; 0 without SVE."""
    sme_bits: int
    """Vector length in bits in SME's streaming mode; 0 without SME."""

    def distinct(self, *families: str) -> tuple[str, ...]:
        """Runnable variants with different kernels for ``families``, so that tests run each kernel once.

        Args:
            families: names such as ``"linear"``; without any, all families.
        """
        seen: dict[tuple[str, ...], str] = {}
        for name in self.runnable:
            table = self.tables[name]
            seen.setdefault(tuple(table[family] for family in families or table), name)
        return tuple(seen.values())


def machine() -> Machine:
    """Describes the CPU's features and the kernel variants."""
    fields = json.loads(torch.ops.armllm.isa_list())
    fields["families"] = {family: Choice(**choice) for family, choice in fields["families"].items()}
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Machine(**arguments)


def select(name: str) -> str:
    """Selects the kernel variant ``name`` (``""`` selects the default) and returns the selected name.

    Raises:
        RuntimeError: the name is unknown, or the CPU lacks a required feature; the message lists the
            variants.
    """
    chosen: str = torch.ops.armllm.isa_select(name)
    return chosen


@contextmanager
def use(name: str) -> Iterator[str]:
    """Runs a ``with`` block with another kernel variant, then restores the previous variant."""
    before = machine().selected
    try:
        yield select(name)
    finally:
        select(before)
