"""The kernel variant that a process starts with: the best that the CPU runs, or what ARMLLM_ISA names."""

from __future__ import annotations

import os

import pytest

from torch_armllm.ops import isa


def test_first_variant() -> None:
    machine = isa.machine()
    assert machine.selected == (os.environ.get("ARMLLM_ISA") or machine.runnable[0])


def test_variants_need_features() -> None:
    machine = isa.machine()
    assert set(machine.runnable) <= set(machine.variants)
    for name, feature in (("neon", "asimd"), ("dotprod", "dotprod"), ("i8mm", "i8mm")):
        if name in machine.variants:
            assert (name in machine.runnable) == (feature in machine.features)


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unknown kernel variant 'abacus'; there are: .*scalar"):
        isa.select("abacus")
