"""Tests of the memory that tracing leaves behind."""

from __future__ import annotations

import subprocess
import sys

_COUNT = """
import gc

from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.support.models import tiny
from torch_armllm import patch

for _ in range(4):
    patch(tiny("llama"), progress=False)
for _ in range(3):  # C++ objects lie between Python's, so a collection frees what the next one finds
    gc.collect()
assert not graph_module._loader.eval_cache
print(sum(type(found) is ShapeEnv for found in gc.get_objects()))
"""


def test_patched_models_leave_no_symbolic_shapes_and_sources() -> None:
    """They run in a process of their own: pytest keeps torch's log records, and with them what they show."""
    ended = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True)
    assert int(ended.stdout) <= 1  # torch keeps the context of the last export
