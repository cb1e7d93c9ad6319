"""Folders of checkpoints, and edits that damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.formats import test_awq
from tests.fuzz.checkpoints.corpus import COMPRESSED, encode_compressed
from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm import Recipe, load
from torch_armllm.quant.inplace import quantize


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Edits the tensors of a file, and keeps what its header says."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    state = load_file(file)
    edit(state)
    save_file(state, file, metadata)


def refused(folder: Path, message: str) -> None:
    """Asserts that loading a folder raises a ValueError."""
    with pytest.raises(ValueError, match=message):
        load(str(folder), fuse=False)


def retyped(folder: Path, name: str, dtype: str) -> None:
    """Changes the dtype of a tensor in the header of its file."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])


def packed(folder: Path, family: str, scheme: str = "int4", **overrides: Any) -> None:
    """Writes a folder of a tiny model that this package quantized."""
    model = tiny(family, **overrides)
    quantize(model, Recipe(scheme, importance=False), progress=False)
    model.save_pretrained(folder)


def awq(folder: Path) -> Path:
    """Returns a folder as AutoAWQ writes it."""
    saved_folders.write(folder, "qwen3", test_awq.encoder(32), test_awq.settings(32))
    return folder / "quantized"


def compressed(folder: Path) -> Path:
    """Returns a folder as compressed-tensors writes it."""
    saved_folders.write(folder, "qwen3", encode_compressed, COMPRESSED)
    return folder / "quantized"
