"""The first op of a process: threads that have not run any op must partition its work like the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_processes")
SCRIPT = """
import sys
import torch
torch.manual_seed(0)
from tests.support.packed_weights import packed, quant_linear
weight, x = packed(1152, 1536, "g32i"), torch.randn(12, 1536)
first = quant_linear(x, weight, 1152, "g32i")
sys.exit(0 if torch.equal(first, quant_linear(x, weight, 1152, "g32i")) else 1)
"""


@pytest.mark.parametrize("attempt", range(2))
def test_first_run_equals_later_runs_bitwise(attempt: int) -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT], check=False).returncode == 0
