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

for folder in sys.argv[1:]:
    try:
        llm = LLM(folder, skip_tokenizer_init=True, progress=False, threads=1, kv_cache_memory=4 << 20)
    except PermissionError as error:
        print(error, file=sys.stderr)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def generated(
    *command: str, folders: tuple[Path, ...], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Generates with the last folder that can be read, in a process with this environment alone."""
    return subprocess.run(
        [*command, sys.executable, "-c", _GENERATE, *map(str, folders)],
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
    if subprocess.run([*as_user, "cat", torch.__file__], capture_output=True).returncode:
        pytest.skip("other users cannot run this Python")
    model = tiny("llama", torch.bfloat16)
    quantize(model, Recipe(importance=False), progress=False)
    folder, private = tmp_path / "model", tmp_path / "private"
    model.save_pretrained(folder)
    shutil.copytree(folder, private)
    usual = generated(folders=(folder,), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert usual.returncode == 0, usual.stderr

    shared = Path(tempfile.gettempdir())
    for parent in (tmp_path, *tmp_path.parents):
        if parent.is_relative_to(shared) and parent != shared:
            parent.chmod(0o755)
    (private / "model.safetensors").chmod(0o600)
    (folder / "model.safetensors").chmod(0o644)
    found = generated(*as_user, folders=(private, folder))
    assert found.returncode == 0, found.stderr
    assert f"[Errno 13] Permission denied: '{private}/model.safetensors'" in found.stderr
    assert found.stdout == usual.stdout
    assert "the plan is not cached: FileNotFoundError: there is no home folder" in found.stderr


def test_files_that_cannot_be_read_are_not_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.mkdir()  # root may read every file
    with pytest.raises(OSError, match="Is a directory"):
        read_headers([str(file)])
