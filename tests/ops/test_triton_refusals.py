"""Kernel variant ``triton`` without a triton for the CPU, and triton without the variant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SELECT = "from torch_armllm.ops import variants\nvariants.select('triton')"
IMPORT = "import torch_armllm.ops"


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code whose imports look into ``folder`` first."""
    environment = {
        name: v for name, v in os.environ.items() if name not in ("ARMLLM_ISA", "TRITON_INTERPRET")
    }
    path = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def write_triton(folder: Path, text: str, backends: str = "") -> None:
    (folder / "triton" / "backends").mkdir(parents=True)
    (folder / "triton" / "__init__.py").write_text(text)
    (folder / "triton" / "backends" / "__init__.py").write_text(backends)


@pytest.mark.parametrize("way", ["select", "environment"])
def test_missing_triton_is_named_with_the_remedy(way: str, tmp_path: Path) -> None:
    write_triton(tmp_path, "raise ImportError('not here')")
    variables = {"ARMLLM_ISA": "triton"} if way == "environment" else {}
    done = run(IMPORT if variables else SELECT, tmp_path, **variables)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        "RuntimeError: kernel variant 'triton' needs the package triton (not here): pip install"
    )
    assert "set TRITON_INTERPRET=1" in message


def test_triton_without_a_cpu_backend_is_refused(tmp_path: Path) -> None:
    write_triton(tmp_path, "__version__ = '9.8'", "backends = {'nvidia': None, 'amd': None}")
    done = run(SELECT, tmp_path)
    assert done.returncode == 1
    assert "needs a triton with a CPU backend, and triton 9.8 has only amd, nvidia: set TRITON" in done.stderr


def test_triton_is_not_imported_otherwise(tmp_path: Path) -> None:
    """A refused selection leaves the compiled variant as it was."""
    write_triton(tmp_path, "raise ImportError('not here')")
    code = (
        "import sys, torch\nfrom torch_armllm.ops import norm, variants\n"
        "x = torch.ones(1, 3)\nnorm.rms_norm(x, x[0], 0.0)\nwith variants.use('scalar'): pass\n"
        "print(any(name.startswith('triton') for name in sys.modules))\n"
        "try: variants.select('triton')\nexcept RuntimeError: print(variants.machine().selected)"
    )
    done = run(code, tmp_path, ARMLLM_ISA="scalar")
    assert done.stdout == "False\nscalar\n", done.stderr
