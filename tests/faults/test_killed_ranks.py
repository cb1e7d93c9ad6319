"""Aborts on tensor parallel ranks, and ranks that are killed; `make faults` runs more of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.thorough  # `make faults` does it, too
@pytest.mark.slow
def test_a_thousand_requests_with_aborts_then_each_rank_is_killed() -> None:
    # in a process of its own: pytest keeps the records of logged errors, and with them the engine
    command = [sys.executable, "-m", "tests.faults.killed_ranks", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["finished"] > 700 and counts["aborted"] > 50
