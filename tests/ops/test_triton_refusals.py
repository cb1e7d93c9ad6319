"""Kernel variant ``triton`` without a triton for the CPU, and triton without the variant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(code: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code whose imports look into ``folder`` first."""
    environment = {
        name: v for name, v in os.environ.items() if name not in ("ARMLLM_ISA", "TRITON_INTERPRET")
    }
    path = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def write_triton(folder: Path, text: str, backends: str = "") -> None:
    (folder / "triton" / "backends").mkdir(parents=True)
    (folder / "triton" / "__init__.py").write_text(text)
    (folder / "triton" / "backends" / "__init__.py").write_text(backends)


def test_missing_triton_is_named_with_the_remedy(tmp_path: Path) -> None:
    write_triton(tmp_path, "raise ImportError('not here')")
    done = run("import torch_armllm.ops", tmp_path, ARMLLM_ISA="triton")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        "RuntimeError: kernel variant 'triton' needs the package triton (not here): pip install"
    )
    assert "set TRITON_INTERPRET=1" in message


def test_refused_selections_leave_the_compiled_variant_as_it_was(tmp_path: Path) -> None:
    """Triton is not imported otherwise."""
    write_triton(tmp_path / "broken", "raise ImportError('not here')")
    write_triton(tmp_path / "gpu", "__version__ = '9.8'", "backends = {'nvidia': None, 'amd': None}")
    code = (
        "import sys, torch\nfrom torch_armllm.ops import norm, variants\n"
        "x = torch.ones(1, 3)\nnorm.rms_norm(x, x[0], 0.0)\nwith variants.use('scalar'): pass\n"
        "print(any(name.startswith('triton') for name in sys.modules))\n"
        "for folder in sys.argv[1:]:\n"
        "    sys.path.insert(0, folder)\n"
        "    try: variants.select('triton')\n"
        "    except RuntimeError as error: print(variants.machine().selected, error)\n"
    )
    done = run(code, tmp_path, *(str(tmp_path / name) for name in ("broken", "gpu")), ARMLLM_ISA="scalar")
    imported, broken, gpu = done.stdout.splitlines()
    assert imported == "False", done.stderr
    refused = "scalar kernel variant 'triton' needs"
    assert broken.startswith(f"{refused} the package triton (not here): pip install")
    assert gpu.startswith(f"{refused} a triton with a CPU backend, and triton 9.8 has only amd, nvidia: set")
