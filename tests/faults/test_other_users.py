"""Runs as a user without a home, a name and rights, as containers and services have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny
from torch_armllm import Recipe
from torch_armllm.checkpoint.tensor_headers import read_headers
from torch_armllm.quant.inplace import quantize

_USER = 54321
_GENERATE = """
import sys
from torch_armllm import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, progress=False, threads=1, kv_cache_memory=4 << 20)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def generated(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Generates in a process with this environment alone."""
    return subprocess.run(
        [*command, sys.executable, "-c", _GENERATE, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
    )


@pytest.mark.usefixtures("warm_processes")  # but those of the other user begin as ever
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_user_without_a_home_and_a_name(tmp_path: Path) -> None:
    as_user = ("setpriv", f"--reuid={_USER}", "--clear-groups")
    if subprocess.run([*as_user, sys.executable, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("other users cannot run this Python")
    model = tiny("llama", torch.bfloat16)
    quantize(model, Recipe(importance=False), progress=False)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    usual = generated(folder, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert usual.returncode == 0, usual.stderr

    shared = Path(tempfile.gettempdir())
    for parent in (tmp_path, *tmp_path.parents):
        if parent.is_relative_to(shared) and parent != shared:
            parent.chmod(0o755)
    refused = generated(folder, *as_user)
    assert refused.returncode != 0
    assert f"PermissionError: [Errno 13] Permission denied: '{folder}/model.safetensors'" in refused.stderr

    (folder / "model.safetensors").chmod(0o644)
    found = generated(folder, *as_user)
    assert found.returncode == 0, found.stderr
    assert found.stdout == usual.stdout
    assert "the plan is not cached: FileNotFoundError: there is no home folder" in found.stderr


def test_files_that_cannot_be_read_are_not_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.mkdir()  # root may read every file
    with pytest.raises(OSError, match="Is a directory"):
        read_headers([str(file)])
