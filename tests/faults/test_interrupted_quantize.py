"""Quantizing a folder survives SIGKILL and a full disk: the resumed run writes the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_interrupted_runs_resume_to_the_same_bytes(method: str) -> None:
    # in a process of its own: it forks, and torch's threads do not survive that
    command = [sys.executable, "-m", "tests.faults.interrupted_quantize", "--rounds", "8", "--method", method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] > 0
