"""A few seconds of mixed load; `make soak` runs half an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from tests.faults.soak import Soak


@pytest.mark.usefixtures("warm_processes")
def test_mixed_load(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seed=1)
    soak.run(3, lambda: {"200", "400", "disconnected"} <= soak.counts.keys())
    assert not soak.findings


def test_growing_memory_is_noticed(tmp_path: Path) -> None:
    soak = object.__new__(Soak)
    soak.samples = [(10.0 * n, 100_000_000 + 1_000_000 * n, 9) for n in range(60)]
    first, last = soak.growth()
    assert first == 114_500_000 and last == 154_500_000
