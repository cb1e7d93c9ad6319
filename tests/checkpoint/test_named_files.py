"""Checkpoints whose files name files elsewhere, on every way in."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_armllm
from tests.support.models import tiny
from torch_armllm import LLM
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.checkpoint.named_files import check_named_files
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.pooling.loading import load_pooling
from torch_armllm.pooling.sentence_files import read_sentence_files
from torch_armllm.system.inner_paths import inner_path, is_inner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny("llama").save_pretrained(folder / "other")
    return folder


WAYS: dict[str, Callable[[str], Any]] = {
    "load": torch_armllm.load,
    "LLM": lambda folder: LLM(folder, skip_tokenizer_init=True),
    "quantize": lambda folder: quantize_folder(folder, f"{folder}-int4", progress=False),
    "pooling": lambda folder: load_pooling(ModelRequest(folder, skip_tokenizer_init=True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_elsewhere_are_refused(way: str, checkpoint: Path) -> None:
    for place in ("../other/model.safetensors", str(checkpoint / "other/model.safetensors"), ".."):
        shutil.copytree(checkpoint / "other", checkpoint / "model", dirs_exist_ok=True)
        (checkpoint / "model/model.safetensors").unlink()
        names = [*tiny("llama").state_dict()]
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, place)}
        (checkpoint / "model/model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="the name of a file is expected"):
            WAYS[way](str(checkpoint / "model"))


@pytest.mark.parametrize(
    "fields",
    [
        {"fast_tokenizer_files": ["tokenizer.json", "../other/tokenizer.4.0.0.json"]},
        {"fast_tokenizer_files": ["/other/tokenizer.4.0.0.json"]},
        {"chat_template": [{"name": "../../.bashrc", "template": ""}]},
    ],
)
def test_tokenizer_that_names_files_elsewhere_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text("{}")
    for check in (load_tokenizer, check_named_files):
        with pytest.raises(ValueError, match="leaves its own folder|is no name of a file"):
            check(str(tmp_path))


@pytest.mark.parametrize("kind", ["Transformer", "Pooling", "Dense"])
@pytest.mark.parametrize(
    "path", ["../outside", "/outside", "1_Pooling/../../outside", "link", "1_Pooling", 3]
)
def test_sentence_module_elsewhere_is_refused(kind: str, path: Any, tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    (folder / "1_Pooling").mkdir(parents=True)
    outside.mkdir()
    (outside / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    (folder / "link").symlink_to(outside)
    (folder / "1_Pooling/config.json").symlink_to(outside / "config.json")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="modules.json of .* has .*(leaves its own folder|is expected)"):
        read_sentence_files(str(folder))


def test_snapshot_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (blobs / "1").write_text(json.dumps(modules))
    (blobs / "2").write_text(json.dumps({"pooling_mode": "cls"}))
    (snapshot / "modules.json").symlink_to("../../blobs/1")
    (snapshot / "1_Pooling/config.json").symlink_to("../../../blobs/2")
    assert read_sentence_files(str(snapshot)).modes == ("cls",)


def test_a_path_leaves_a_folder_by_its_name_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/inside").symlink_to("absent")
    (tmp_path / "folder/out").symlink_to(tmp_path)
    assert inner_path(tmp_path / "folder", "inside", "x") == tmp_path / "folder/inside"
    assert is_inner(tmp_path / "folder/a..b", tmp_path / "folder")
    for name in ("..", "a/../b", "/etc", "out", "out/x", "a\\b", "a\0b", None):
        with pytest.raises(ValueError, match="^x has "):
            inner_path(tmp_path / "folder", name, "x")


def test_copy_of_a_link_is_named(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = shutil.copytree(checkpoint / "other", tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    caplog.set_level(logging.WARNING, "torch_armllm")
    quantize_folder(source, tmp_path / "int4", progress=False)
    assert f"notes.txt is a link: the new folder has a copy of {tmp_path / 'secret'}" in caplog.text
