"""The kernel variant of a process: the best that the CPU supports, or the one that ARMLLM_ISA names."""

from __future__ import annotations

import os
import re

import pytest

from torch_armllm.engine.reports import diagnostics
from torch_armllm.ops import variants

NEEDS = {
    "neon": {"asimd"},
    "dotprod": {"dotprod"},
    "i8mm": {"i8mm", "bf16"},
    "sve": {"sve"},
    "svei8mm": {"sve_i8mm"},
    "sme2": {"sme2"},
}


def best_linear(machine: variants.Machine) -> str:
    """Return the variant that linear layers should use, derived independently."""
    long = machine.sve_bits >= 256
    for name, use in (("sme2", True), ("svei8mm", long), ("i8mm", True), ("sve", long), ("dotprod", True)):
        if use and NEEDS[name] <= set(machine.features) and name in machine.variants:
            return name
    return "neon"


def test_first_variant() -> None:
    machine = variants.machine()
    assert machine.selected == (os.environ.get("ARMLLM_ISA") or machine.runnable[0])


def test_variants_need_features() -> None:
    machine = variants.machine()
    assert set(machine.runnable) <= set(machine.variants)
    for name, features in NEEDS.items():
        if name in machine.variants:
            assert (name in machine.runnable) == (features <= set(machine.features))


@pytest.mark.skipif("neon" not in variants.machine().variants, reason="about the Arm variants")
def test_env_names_the_right_variants() -> None:
    machine = variants.machine()
    kernels = diagnostics.describe()["kernels"]
    forced = os.environ.get("ARMLLM_ISA")
    linear = forced or best_linear(machine)
    assert kernels["linear"]["variant"] == linear
    lines = re.sub("\n +", " ", diagnostics.render(diagnostics.describe())).splitlines()
    (text,) = (line for line in lines if line.startswith("linear "))
    work = {"sme2": "SMOPA", "svei8mm": "SVE SMMLA", "i8mm": "SMMLA", "sve": "SVE SDOT", "dotprod": "SDOT"}
    assert f"{linear} ({work.get(linear, 'SMULL')}" in text
    if machine.sve_bits == 128 and not forced:
        assert "svei8mm not preferred: 128-bit vectors" in text
    if linear == "dotprod":
        assert "i8mm needs fhm, i8mm, bf16" in text
    # Without BF16 instructions no float kernel may require them.
    if "bf16" not in machine.features:
        for family in ("attention", "dense"):
            assert kernels[family]["variant"] in ("dotprod", "neon", "scalar")


def test_unknown_variant_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="unknown kernel variant 'abacus'; choose from: .*scalar"):
        variants.select("abacus")
