"""Quantization from folder to folder in blocks: the same bits as in memory, also after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.support.calibration import same_tensors, tensors
from tests.support.models import logits, tiny
from torch_armllm.checkpoint import journal
from torch_armllm.checkpoint.block_reader import BlockReader, block_of
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.cli import main
from torch_armllm.quant.recipe import Recipe

TIED: dict[str, Any] = {"dtype": torch.bfloat16, "tie_word_embeddings": True}


def usual_mode(folder: Path) -> str:
    """Returns the mode of new files."""
    (folder / "new").touch()
    return oct((folder / "new").stat().st_mode)


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes every block as soon as it is finished."""
    monkeypatch.setattr(journal, "_SHARD", 1)


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", TIED), ("gpt2", {}), ("mixtral", {}), ("qwen3_moe", TIED), ("gpt_oss", {})],
)
def test_folder_equals_that_of_save_pretrained(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe("g64", overrides={"attention": "int8", "*.1.*.o_proj": None} if family != "gpt2" else {})
    model = tiny(family, **options)
    model.save_pretrained(tmp_path / "float", max_shard_size="100KB")
    report = quantize_folder(tmp_path / "float", tmp_path / "out", recipe, progress=False)
    # loaded, since a converted model's rotary frequencies are rounded to its dtype
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=model.dtype)
    expected = torch_armllm.patch(model, recipe, progress=False)
    assert report.layers == expected.layers
    model.save_pretrained(tmp_path / "saved")
    assert {oct(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {usual_mode(tmp_path)}
    assert any(name.endswith(("_packed", ".rest")) for name in tensors(tmp_path / "out"))
    assert same_tensors(tmp_path / "out", tmp_path / "saved")
    made, saved = (json.loads((tmp_path / x / "config.json").read_text()) for x in ("out", "saved"))
    assert made["quantization_config"] == saved["quantization_config"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == model.dtype
    assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")))


@pytest.mark.usefixtures("in_blocks")
def test_interrupted_run_resumes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = quantize_folder(source, tmp_path / "whole", progress=False)
    read: list[str] = []
    load = BlockReader.load

    def interrupted(self: BlockReader, block: str) -> None:
        if len(read) == 2:
            raise KeyboardInterrupt
        if "layers" in block or len(read) > 2:  # others are also read before the first layer runs
            read.append(block)
        load(self, block)

    monkeypatch.setattr(BlockReader, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "out", progress=False)
    assert read == ["model.layers.0", "model.layers.1"]
    assert not (tmp_path / "out" / "config.json").exists()
    read[:] = [""] * 3
    # a recipe that agrees with the finished layers may resume the run
    report = quantize_folder(source, tmp_path / "out", Recipe(overrides={"head": "int8"}), progress=False)
    assert set(read[3:]) == {"lm_head", "model.embed_tokens", "model.norm"}
    assert report.layers == expected.layers
    assert same_tensors(tmp_path / "whole", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        file.name for file in (tmp_path / "whole").iterdir()
    )


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("in_blocks")
def test_changed_source_or_recipe_is_rejected(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(source, tmp_path / "out", progress=False)
    with pytest.raises(
        ValueError, match=r"q_proj as g32iz, and the recipe says row: start over with restart"
    ):
        quantize_folder(source, tmp_path / "out", Recipe("row"), progress=False)
    with pytest.raises(ValueError, match="an unfinished run of another checkpoint or method"):
        quantize_folder(source, tmp_path / "out", Recipe(method="rtn"), progress=False)
    state = load_file(source / "model.safetensors")
    save_file(
        {name: 2 * tensor for name, tensor in state.items()}, source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="or the checkpoint has changed since: start over"):
        quantize_folder(source, tmp_path / "out", progress=False)
    report = quantize_folder(source, tmp_path / "out", Recipe("row"), restart=True, progress=False)
    assert {layer.scheme for layer in report.layers} == {"row", "int8"}
    with pytest.raises(ValueError, match="is not empty: name a new folder"):
        quantize_folder(source, tmp_path / "out", restart=True, progress=False)


@pytest.mark.usefixtures("in_blocks")
def test_runs_that_end_before_their_first_shard_resume(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "quantizing.json.part").write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(source, out, progress=False)
    (out / ".tmpAbC123").write_bytes(b"of a run that was killed while safetensors wrote a shard")
    (out / "model-00099.safetensors").write_bytes(b"of a run that was killed before its journal names it")
    quantize_folder(source, out, restart=True, progress=False)
    assert not (out / ".tmpAbC123").exists()
    assert not (out / "model-00099.safetensors").exists()
    assert not (out / "quantizing.json").exists()


def test_unsuitable_sources_are_rejected(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state = load_file(source / "model.safetensors")

    def rewrite(**changes: Any) -> None:
        kept = {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}
        save_file(kept, source / "model.safetensors", {"format": "pt"})

    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({name: None}, f"the checkpoint has no {name}: a file is missing"),
        ({name: state[name][:-1].clone()}, f"{name} has the shape"),
        ({name: state[name] * float("nan")}, "up_proj holds nan at"),
    ):
        rewrite(**changed)
        with pytest.raises(ValueError, match=message):
            quantize_folder(source, out, restart=True, progress=False)
        assert not (out / "config.json").exists()
    hurt = state[name].clone() * 0.75
    hurt[:, ::32] = 1.0
    rewrite(**{name: hurt})
    with pytest.raises(ValueError, match=r"up_proj loses .* usual: .* holds no model yet.*overrides="):
        quantize_folder(source, out, restart=True, progress=False)
    (source / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match="is damaged or cut short"):
        quantize_folder(source, out, progress=False)
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no .safetensors files: load it with from_pretrained"):
        quantize_folder(source, out, progress=False)


def test_folders_are_paths_or_texts(source: Path, tmp_path: Path) -> None:
    for kind, out in ((str, "a"), (Path, "b")):
        quantize_folder(kind(source), kind(tmp_path / out), progress=False)
    first, second = (sorted((tmp_path / name).glob("*.safetensors")) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second] != []
    with pytest.raises(ValueError) as refused:
        quantize_folder("/nowhere/at-all", "out")
    assert str(refused.value) == "/nowhere/at-all does not exist: give the folder of a float checkpoint"


def test_quantize_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    arguments = ["quantize", str(source), out, "--fast", "--override", "attention=g64", "--head", "none"]
    assert main.main([*arguments, "--override", "*.1.mlp.*=none", "--ignore", "*.0.mlp.up_proj"]) == 0
    text = capsys.readouterr().out
    assert "% of the weight bytes quantized" in " ".join(text.split())
    assert "3 x model.layers" not in text
    assert "1 x lm_head" in text
    assert main.main(["quantize", out, str(tmp_path / "again")]) == 2
    assert "is quantized already (armllm): name the original model" in capsys.readouterr().err
    assert main.main(["quantize", str(source), str(tmp_path / "x"), "--fast", "--calibration", __file__]) == 2
    assert "--calibration is for gptq and awq, --bits and --tune, not for mse" in capsys.readouterr().err
    assert main.main(["quantize", str(source), out, "--method", "gptq"]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert main.main(["quantize", str(source), str(tmp_path / "x"), "--override", "int8"]) == 2
    assert "--override must be PATTERN=SCHEME" in capsys.readouterr().err


def test_only_one_block_is_in_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[set[str]] = []
    stored = BlockReader.loaded_tensors

    def seen(self: BlockReader) -> dict[str, torch.Tensor]:
        found = stored(self)
        most.append({block_of(name) for name in found})
        return found

    monkeypatch.setattr(BlockReader, "loaded_tensors", seen)
    quantize_folder(source, tmp_path / "out", progress=False)
    assert [len(blocks) for blocks in most] == [1] * 5


@pytest.mark.usefixtures("in_blocks")
def test_a_tied_embedding_that_shares_no_integers_is_written_once(tmp_path: Path) -> None:
    """Gemma's embedding multiplies what it looks up, so it keeps its floats."""
    tiny("gemma", dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path / "float")
    quantize_folder(tmp_path / "float", tmp_path / "out", Recipe(method="rtn"), progress=False)
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert sum("model.embed_tokens.weight" in file for file in files) == 1
    assert torch_armllm.load(str(tmp_path / "out")).get_input_embeddings().weight.dtype == torch.bfloat16
