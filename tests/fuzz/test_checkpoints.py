"""A few mutants of every checkpoint format; `make fuzz` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, target_named

SEEDS = 24


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("checkpoint-")])
def test_mutated_checkpoints(name: str) -> None:
    if name == "checkpoint-torchao":
        pytest.importorskip("torchao.quantization")
    target = target_named(name)
    for seed in range(SEEDS):
        target(seed)
