"""Checkpoints of draft layers: places of their tensors, types that are read, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.draft_engines import (
    MTP,
    accepted,
    loaded,
    sampled,
)
from tests.support.draft_folders import LAYERS, eagle3_folder, mtp_folder
from tests.support.exact_outputs import exact_outputs, prompt, small_engine
from torch_armllm.engine.speculative.mtp import find_layers, mtp_modules
from torch_armllm.model_survey.tiny_models import tiny_model


def test_a_checkpoint_without_the_layer_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no layer for multi-token prediction.*Name the"):
        small_engine(loaded(tmp_path), speculative_config=MTP)


def test_a_model_of_no_folder_is_told_to_name_one(tmp_path: Path, folders: Any) -> None:
    folder, _, _ = folders("glm4_moe")
    model = loaded(folder)
    model.name_or_path = model.config.name_or_path = ""
    with pytest.raises(ValueError, match="was loaded from no folder"):
        small_engine(model, speculative_config=MTP)
    small_engine(model, speculative_config={**MTP, "model": str(folder)})


def test_a_layer_of_another_size_is_refused(tmp_path: Path, folders: Any) -> None:
    folder, _, _ = folders("qwen3_5_text")
    small = tiny_model("llama", hidden_size=32, head_dim=16)
    small.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model's hidden size is 32: name the folder"):
        small_engine(loaded(tmp_path), speculative_config={**MTP, "model": str(folder)})


@pytest.mark.parametrize(
    ("name", "told"), [("hnorm", "hnorm"), ("self_attn.o_proj", "layers.0.self_attn.o_proj")]
)
def test_a_damaged_layer_is_refused(name: str, told: str, tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.{LAYERS}.{name}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {told}.weight"):
        small_engine(loaded(tmp_path), speculative_config=MTP)


def test_fp8_weights_of_a_layer_become_floats(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe")
    file, name = tmp_path / "model.safetensors", f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    tensors = load_file(file)
    narrow = (tensors[name] * 4).to(torch.float8_e4m3fn)
    tensors |= {name: narrow, f"{name}_scale_inv": torch.full((1, 1), 0.25)}
    save_file(tensors, file, metadata={"format": "pt"})
    (base,) = mtp_modules(loaded(tmp_path), None, 4)
    assert torch.equal(base.stack.layers[0].self_attn.o_proj.weight, narrow.float() * 0.25)


def test_drafts_of_other_models_are_refused(tmp_path: Path, folders: Any) -> None:
    folder, _, settings = folders("eagle3")
    model = loaded(folder)
    other = tiny_model("llama", hidden_size=32, head_dim=16)
    eagle3_folder(tmp_path / "narrow", other)
    eagle3_folder(tmp_path / "deep", tiny_model("llama"), eagle_aux_hidden_state_layer_ids=[2, 3, 40])
    for name, told in (("narrow", "reads 96 values"), ("deep", "layers 1 … 5")):
        with pytest.raises(ValueError, match=told):
            small_engine(model, speculative_config={**settings, "model": str(tmp_path / name)})
    with pytest.raises(ValueError, match="no EAGLE-3 draft: it has no fc.weight"):
        small_engine(model, speculative_config={**settings, "model": str(folder)})


class Code:
    """Runs when it is unpickled by a loader that allows it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_pickled_drafts_are_read_without_running_code(tmp_path: Path, folders: Any, models: Any) -> None:
    model, settings = models("eagle3")
    texts, params = [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0)
    folder, ran = tmp_path / "pickled", tmp_path / "ran"
    folder.mkdir()
    source = Path(settings["model"])
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    pickled = {**settings, "model": str(folder)}
    torch.save(tensors, folder / "pytorch_model.bin")
    counts = []
    for each in (settings, pickled):
        engine = small_engine(model, speculative_config=each)
        exact_outputs(engine, texts, params)
        counts.append(accepted(engine))
    assert counts[0] == counts[1] and counts[0][0] > 0
    for content, told in (
        ({**tensors, "more": Code(ran)}, "may run code"),
        ([*tensors], "no tensors by name"),
    ):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=told):
            small_engine(model, speculative_config=pickled)
    assert not ran.exists()


def test_places_of_layers() -> None:
    assert find_layers(["model.layers.3.eh_proj.weight", "eh_proj.weight"], 4) == []
    names = [f"model.language_model.layers.{number}.eh_proj.weight" for number in (5, 4, 7)]
    place, other = find_layers(names, 4)
    assert place.name("model.language_model.layers.4.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert place.name("model.language_model.layers.4.shared_head.norm.weight") == "norm.weight"
    assert place.name("model.language_model.layers.4.shared_head.head.weight") is None
    assert other.name("model.language_model.layers.4.mlp.up_proj.weight") is None
    assert other.name("model.language_model.layers.5.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    (place,) = find_layers(["mtp.fc.weight"], 4)
    assert place.name("mtp.layers.1.mlp.up_proj.weight") is None
