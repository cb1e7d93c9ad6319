"""Commands survive SIGKILL, a full disk and refused memory: the next run ends as an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_WORK = {
    "quantize mse": ["interrupted_quantize", "--rounds", "3", "--method", "mse"],
    "quantize gptq": ["interrupted_quantize", "--rounds", "4", "--method", "gptq"],
    "eval": ["interrupted_eval", "--rounds", "2"],
    "plan cache": ["interrupted_plan_cache", "--rounds", "2"],
    "server": ["interrupted_server", "--rounds", "2"],
    "memory": ["limited_memory", "--rounds", "8"],
}
_ALWAYS = ("quantize mse", "plan cache", "server")
"""Work that is interrupted in every run of the tests; each takes half a minute."""
_PACKAGES = {"eval": "lm_eval", "server": "fastapi"}


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    "work", [pytest.param(work, marks=[pytest.mark.thorough] * (work not in _ALWAYS)) for work in _WORK]
)
def test_work_is_completed_after_faults(work: str) -> None:
    if (package := _PACKAGES.get(work)) is not None:
        pytest.importorskip(package)
    name, *arguments = _WORK[work]
    # in a process of its own: it forks, and torch's threads do not survive that
    command = [sys.executable, "-m", f"tests.faults.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert any(counts.get(name, 0) > 0 for name in ("finished", "whole", "answered"))
