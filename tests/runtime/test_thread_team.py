"""The thread team has no data race, and computes what a single thread does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runtime import thread_team


def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    try:
        output = thread_team.run(thread_team.build(tmp_path), runs=100, seed=1)
    except thread_team.Unavailable as reason:
        pytest.skip(str(reason))
    phases = re.fullmatch(r"(\d+) phases, 0 failures\n", output)
    assert phases is not None and int(phases[1]) > 1000
