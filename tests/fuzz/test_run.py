"""The driver of the fuzz targets finds seeds that raise, end the process or stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.fuzz.run import fuzz


def fragile(seed: int) -> None:
    """A target that fails in every way."""
    if seed == 3:
        raise ValueError("three")
    if seed == 9:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 5:
        time.sleep(60)


def test_seeds_with_findings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tally = fuzz("tests.fuzz.test_run:fragile", 0, 0, 20, 3)
    assert tally.inputs == 20
    assert dict(tally.findings) == {
        "ValueError": 1,
        "the process ended with status -11": 1,
        "no answer within 3 s": 1,
    }
    shown = capsys.readouterr().out
    for seed in (3, 5, 9):
        assert f"tests.fuzz.test_run:fragile, seed {seed}:" in shown
