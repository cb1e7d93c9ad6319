"""Foundations of `make bench`: timing in turn, cold copies, and the machine's limits."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from bench.ops import limits, timing


def test_alternating_timing_returns_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(timing, "time", clock)
    slow = iter([2.0, 2.0, 2.0, 9.0, 3.0])  # two calls before the rounds, then one in each

    def take(seconds: float) -> None:
        now[0] += seconds

    seconds = timing.in_turn({"quick": lambda: take(0.002), "slow": lambda: take(next(slow))}, rounds=3)
    assert seconds == {"quick": pytest.approx(0.002), "slow": pytest.approx(3.0)}


def test_cold_copies_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 3000)
    source = timing.cold(lambda: object(), 1000)
    first = [source() for _ in range(3)]
    assert len(set(map(id, first))) == 3
    assert source() is first[0]


def test_huge_page_copy_is_equal_and_aligned() -> None:
    tensor = torch.randn(300, 7).bfloat16()
    copy = timing.on_huge_pages(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() % (1 << 21) == 0


def test_threads_are_set_and_restored() -> None:
    before = torch.get_num_threads()
    with timing.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_limits_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 22)
    limits._memory.cache_clear()
    assert 1e8 < limits.bandwidth(1) < 1e13
    reader = limits.Reader(1 << 20)
    for _ in range(9):  # past the end and back to the start
        reader()
    assert limits.int8_peak(1) >= 0 and limits.bf16_peak(1) >= 0
    limits._memory.cache_clear()
