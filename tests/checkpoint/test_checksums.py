"""Checksums in saved folders, and their verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.models import tiny, token_ids
from torch_armllm import LLM, Recipe, load
from torch_armllm.checkpoint.load import load_model, verify_source
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.cli.main import main
from torch_armllm.quant.inplace import quantize

FAMILIES = ["llama", "mixtral", "qwen3_moe", "gpt_oss", "gpt2"]


def names_of(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def flip(file: Path, seed: int) -> None:
    """Flips one bit of the tensors in a file."""
    whole = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    at = start + (len(whole) - start) * seed // 100
    whole[at] ^= 1 << (seed % 8)
    file.write_bytes(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_a_checksum(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / "float")
    quantize(model, Recipe(importance=False, overrides={"experts": None} if family == "mixtral" else {}))
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    quantize_folder(tmp_path / "float", tmp_path / "streamed", progress=False)
    for folder in (tmp_path / "saved", tmp_path / "streamed"):
        assert verify_source(str(folder)) == len(names_of(folder))
        assert load(str(folder), fuse=False, verify=True) is not None
    with pytest.raises(
        ValueError, match=r"model.safetensors has no checksums, so it cannot be verified: save"
    ):
        load(str(tmp_path / "float"), verify=True)


@pytest.mark.parametrize("seed", range(0, 100, 9))
def test_a_flipped_bit_is_found(seed: int, saved: Path) -> None:
    flip(saved / "model.safetensors", seed)
    with pytest.raises(
        ValueError, match=r"the checksum of model\.\S+|the checksum of lm_head\S+ in .*model.safe"
    ):
        load(str(saved), fuse=False, verify=True)


def test_every_way_to_load_verifies(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "max_model_len": 32}
    LLM(str(saved), verify=True, **options)
    with pytest.raises(ValueError, match="verify is for a model that is yet to be loaded"):
        LLM(load(str(saved)), verify=True, **options)
    flip(saved / "model.safetensors", 50)
    LLM(str(saved), **options)
    with pytest.raises(ValueError, match="the checksum of"):
        LLM(str(saved), verify=True, **options)
    assert main(["chat", str(saved), "--verify"]) == 2
    assert "the checksum of" in capsys.readouterr().err


def test_folders_of_earlier_versions_load(saved: Path) -> None:
    file = saved / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})
    with torch.no_grad():
        assert load_model(str(saved))(token_ids()).logits.isfinite().all()


def test_a_damaged_record(saved: Path) -> None:
    file = saved / "model.safetensors"
    state = load_file(file)
    with safe_open(file, framework="pt") as opened:
        record = opened.metadata()
    for name, text, message in (
        ("tensors", "[1]", r"tensors in its header is '\[1\]', not an object"),
        ("schemes", "{", "schemes in its header is no JSON"),
        ("tensors", json.dumps({"x": 1}), "which was not saved with it"),
    ):
        save_file(state, file, {**record, name: text})
        with pytest.raises(ValueError, match=message):
            load(str(saved), fuse=False)
