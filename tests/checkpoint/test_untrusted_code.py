"""Code that comes with a checkpoint is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.damaged_folders import edit_config
from tests.checkpoint.formats import test_awq
from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm import load
from torch_armllm.checkpoint.load import load_model


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit_config(tmp_path, lambda config: config.update(model_type="evil", auto_map=names))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for loads in (load, load_model):
        with pytest.raises(
            ValueError, match=r"needs code of its own \(auto_map in config.json\), which is never"
        ):
            loads(str(tmp_path))


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def test_pickles_cannot_run_code(tmp_path: Path) -> None:
    saved_folders.write(tmp_path, "llama", test_awq.encoder(32), test_awq.settings(32))
    for folder in (tmp_path / "quantized", tmp_path / "float"):
        (folder / "model.safetensors").unlink()
        torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is damaged, or its tensors are pickled objects"):
        load(str(tmp_path / "quantized"), fuse=False)
    with pytest.raises(ValueError, match="float"):
        load(str(tmp_path / "float"), fuse=False)
