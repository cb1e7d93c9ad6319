"""Calibration from folder to folder, a decoder layer at a time: the same bits as in memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import torch_armllm
from tests.quant.methods.loud_model import loud
from tests.support.calibration import CALIBRATION, interrupted_at, same_tensors, tensors
from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint import streamed_calibration
from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.checkpoint.streamed_calibration import saved_tokens
from torch_armllm.cli import main
from torch_armllm.llm import calibration_text
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.quant.recipe import Recipe

TIED: dict[str, Any] = {"dtype": torch.bfloat16, "tie_word_embeddings": True}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("family", "options"), [("llama", TIED), ("gpt2", {}), ("qwen3_moe", {}), ("bamba", {})]
)  # layers of bamba return pairs
def test_streamed_calibration_equals_calibration_in_memory(
    method: str, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made = tiny_model(family) if family == "bamba" else tiny(family, **options)
    made.save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    recipe = Recipe(method=method)
    report = quantize_folder(
        tmp_path / "float", tmp_path / "out", recipe, progress=False, calibration=CALIBRATION
    )
    expected = torch_armllm.quantize(model, Recipe(method=method), calibration=CALIBRATION, progress=False)
    assert report.layers == expected
    model.save_pretrained(tmp_path / "saved")
    assert same_tensors(tmp_path / "out", tmp_path / "saved")
    assert not list((tmp_path / "out").glob("calibrating*"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["mse", "gptq", "awq"])
@pytest.mark.parametrize("family", ["gemma", "nemotron"])
def test_streamed_norms_of_one_plus_weight_keep_their_bits(family: str, method: str, tmp_path: Path) -> None:
    loud(family, **TIED).save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    recipe, tokens = Recipe(method=method), None if method == "mse" else CALIBRATION
    quantize_folder(tmp_path / "float", tmp_path / "out", recipe, progress=False, calibration=tokens)
    fuse = method == "mse"
    torch_armllm.quantize(model, recipe, calibration=tokens, progress=False)
    model.save_pretrained(tmp_path / "saved")
    loaded = torch_armllm.load(str(tmp_path / "out"), fuse=fuse)
    loaded.save_pretrained(tmp_path / "again")
    theirs = tensors(tmp_path / "saved")
    for folder in ("out", "again"):
        ours = tensors(tmp_path / folder)
        assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert theirs["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert model.dtype == loaded.dtype == torch.bfloat16
    ids = token_ids(2, 9)
    if fuse:
        torch_armllm.patch(model, None, progress=False)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_interrupted_calibration_resumes(
    method: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, recipe = tmp_path / "out", Recipe(method=method)
    expected = quantize_folder(source, tmp_path / "whole", recipe, progress=False, calibration=CALIBRATION)
    with interrupted_at("model.layers.1"):
        quantize_folder(source, out, recipe, progress=False, calibration=CALIBRATION)
    assert torch.equal(saved_tokens(out), CALIBRATION)
    with pytest.raises(ValueError, match="other calibration tokens"):
        quantize_folder(source, out, recipe, progress=False, calibration=CALIBRATION.flip(0))
    seen: list[str] = []
    load = BlockReader.load
    monkeypatch.setattr(BlockReader, "load", lambda self, block: (seen.append(block), load(self, block)))
    report = quantize_folder(source, out, recipe, progress=False, calibration=CALIBRATION)
    assert "model.layers.0" not in seen
    assert report.layers == expected.layers
    assert same_tensors(tmp_path / "whole", out)


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_run_keeps_norms_with_float32_weights(tmp_path: Path) -> None:
    source, out = tmp_path / "float", tmp_path / "out"
    loud("gemma", **TIED).save_pretrained(source)
    quantize_folder(source, tmp_path / "whole", progress=False)
    with interrupted_at("model.layers.1"):
        quantize_folder(source, out, progress=False)
    quantize_folder(source, out, progress=False)
    assert tensors(out)["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert same_tensors(tmp_path / "whole", out)
    states = [torch_armllm.load(str(folder), fuse=False).state_dict() for folder in (tmp_path / "whole", out)]
    for name, tensor in states[0].items():
        assert states[1][name].dtype == tensor.dtype and torch.equal(states[1][name], tensor)


@pytest.mark.parametrize(("seconds", "said"), [(100, True), (10, False)])
def test_a_long_run_says_how_long_it_takes(
    seconds: int,
    said: bool,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(streamed_calibration, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with caplog.at_level("INFO"):
        quantize_folder(
            source, tmp_path / "out", Recipe(method="gptq"), progress=False, calibration=CALIBRATION
        )
    line = "a decoder layer takes 100 s: about 2 min for the other 1 (quantize --fast takes seconds)"
    assert (line in caplog.text) == said
    assert caplog.text.count("a decoder layer takes") == int(said)


def test_model_that_cannot_be_calibrated_layer_by_layer_is_rejected(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="needs calibration texts"):
        quantize_folder(source, tmp_path / "out", Recipe(method="gptq"), progress=False)
    inner = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaModel, "forward", _sharing(LlamaModel.forward))
    monkeypatch.setattr(LlamaDecoderLayer, "forward", _writing(inner))
    with pytest.raises(
        ValueError, match=r"layer by layer \(its layers share more .*: load the whole model and use"
    ):
        quantize_folder(
            source, tmp_path / "out", Recipe(method="gptq"), progress=False, calibration=CALIBRATION
        )


@pytest.mark.parametrize("family", ["cpmant", "blt"])
def test_without_layers_that_can_be_left_out_weights_are_rounded_without_statistics(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(family).save_pretrained(tmp_path / "float")
    quantize_folder(tmp_path / "float", tmp_path / "out", progress=False)
    assert "layer by layer" in caplog.text and "without input statistics" in caplog.text


def _sharing(inner: Any) -> Any:
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return inner(self, *args, board={}, **named)

    return forward


def _writing(inner: Any) -> Any:
    def forward(self: Any, *args: Any, board: dict[str, int], **named: Any) -> Any:
        board["seen"] = 1
        return inner(self, *args, **named)

    return forward


def test_generated_texts_are_cut_to_the_positions_of_the_model(source: Path) -> None:
    config = AutoConfig.from_pretrained(source)
    positions = config.max_position_embeddings
    assert calibration_text.calibration_tokens(str(source), None, 2, 9).shape == (2, 9)
    assert calibration_text.calibration_tokens(str(source), None, 2, positions + 8).shape == (2, positions)


def test_command_calibrates_with_generated_tokens(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 3)
    monkeypatch.setattr(calibration_text, "LENGTH", 24)
    own = calibration_text.calibration_tokens(str(source), None)
    assert own.shape == (3, 24)
    assert len({tuple(row.tolist()) for row in own}) == 3
    calibration_text.generated_tokens.cache_clear()
    assert torch.equal(calibration_text.calibration_tokens(str(source), None), own)
    assert main.main(["quantize", str(source), str(tmp_path / "out"), "--method", "gptq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["layers"]
    quantize_folder(source, tmp_path / "same", Recipe(method="gptq"), progress=False, calibration=own)
    assert same_tensors(tmp_path / "out", tmp_path / "same")
