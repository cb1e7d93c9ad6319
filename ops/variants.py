"""Kernel variants: those that this CPU can run, and the selected variant."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TRITON = "triton"
"""The variant that has ops as Triton kernels, in the place of the compiled ones."""
VARIABLE = "ARMLLM_ISA"

_logger = logging.getLogger(__name__)
_triton_ops: torch.library.Library | None = None  # while the variant is selected


@dataclass(frozen=True)
class VariantChoice:
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
    compiled: str
    """The variant of plans and of ops without a Triton kernel: ``selected``, unless that is ``triton``."""
    families: dict[str, VariantChoice]
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
    fields["compiled"] = fields["selected"]
    fields["families"] = {family: VariantChoice(**choice) for family, choice in fields["families"].items()}
    if _triton_ops is not None:
        from torch_armllm.ops import triton

        fields["selected"] = TRITON
        for family in triton.FAMILIES:
            plans = fields["families"][family]
            why = f"{triton.BACKEND}; plans use {plans.variant}: {plans.why}"
            fields["families"][family] = VariantChoice(TRITON, why)
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Machine(**arguments)


def select(name: str) -> str:
    """Selects the kernel variant ``name`` (``""`` selects the default) and returns the selected name.

    ``triton`` puts Triton kernels in the place of some ops; all else runs the best compiled kernels.

    Raises:
        RuntimeError: the name is unknown, or the CPU lacks a required feature; the message lists the
            variants.  For ``triton``: there is no Triton that runs on the CPU.
    """
    global _triton_ops
    if (name or os.environ.get(VARIABLE)) == TRITON:
        from torch_armllm.ops import triton

        compiled = torch.ops.armllm.isa_select("")
        if _triton_ops is None:
            _triton_ops = triton.register()
        _say_what_triton_runs(", ".join(triton.OPS), triton.BACKEND, compiled)
        return TRITON
    chosen: str = torch.ops.armllm.isa_select(name)
    if _triton_ops is not None:
        _triton_ops._destroy()
        _triton_ops = None
    return chosen


@functools.cache
def _say_what_triton_runs(ops: str, backend: str, compiled: str) -> None:
    _logger.warning(
        "%s runs the ops %s; other ops, and the plans of patched models and engines, run the kernels of %s",
        backend,
        ops,
        compiled,
    )


@contextmanager
def use(name: str) -> Iterator[str]:
    """Runs a ``with`` block with another kernel variant, then restores the previous variant."""
    before = machine().selected
    try:
        yield select(name)
    finally:
        select(before)
