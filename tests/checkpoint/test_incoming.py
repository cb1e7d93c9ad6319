"""Folders that hold less or more than their model are refused by name, on every way in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.damaged_folders import edit_config, edit_tensors
from tests.checkpoint.formats import test_gptq
from tests.support.models import tiny, token_ids
from torch_armllm import load
from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.load import load_model
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.checkpoint.weight_files import weight_files
from torch_armllm.lora.adapter import CONFIG as ADAPTER
from torch_armllm.pooling.loading import load_pooling

WAYS: dict[str, Callable[[str], Any]] = {
    "LLM": lambda folder: load_model(folder, "auto"),
    "load": lambda folder: load(folder, fuse=False),
    "quantize": lambda folder: quantize_folder(folder, f"{folder}-out", progress=False),
    "pooling": lambda folder: load_pooling(ModelRequest(folder, skip_tokenizer_init=True, progress=False)),
}
ways = pytest.mark.parametrize("way", WAYS)
NAME = "model.layers.1.self_attn.q_proj.weight"


def _refused(way: str, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WAYS[way](str(folder))
    assert not Path(f"{folder}-out", "config.json").exists()


@ways
def test_missing_tensors(way: str, source: Path) -> None:
    edit_tensors(source, lambda state: state.pop(NAME))
    _refused(
        way, source, rf"the checkpoint has no (model\.)?{NAME.removeprefix('model.')}: a file is missing"
    )


@ways
@pytest.mark.parametrize(
    "extra",
    [
        {"model.layers.2.mlp.up_proj.weight": torch.ones(4, 4)},
        {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
        {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
        {"model.layers.0.self_attn.sinks": torch.ones(4)},
    ],
)
def test_tensors_that_the_configuration_forgets(way: str, extra: dict[str, Tensor], source: Path) -> None:
    edit_tensors(source, lambda state: state.update(extra))
    _refused(way, source, f"holds {next(iter(extra))}, and Llama.* has no such tensor")


@ways
def test_tensors_that_change_nothing(way: str, source: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
    }
    edit_tensors(source, lambda state: state.update(extra))
    WAYS[way](str(source))


@ways
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale", "SCB", None])
def test_narrow_weights_without_settings(way: str, suffix: str | None, source: Path) -> None:
    def narrow(state: dict[str, Tensor]) -> None:
        state[NAME] = state[NAME].to(torch.float8_e4m3fn)
        if suffix is not None:
            state[f"{NAME.removesuffix('weight')}{suffix}"] = torch.ones(1, 1)

    edit_tensors(source, narrow)
    message = "F8_E4M3" if suffix is None else f"q_proj.{suffix}, which looks like a part of a weight"
    _refused(way, source, f"{message}.*nothing reads it|{message}.*is expected")


@ways
def test_integers_in_the_place_of_floats(way: str, source: Path) -> None:
    edit_tensors(source, lambda state: state.update({NAME: state[NAME].to(torch.int8)}))
    _refused(way, source, f"{NAME} is I8 in .*, and .* expected")


def _with_own_head(folder: Path) -> Any:
    """Writes a folder whose configuration ties a head that it holds; returns the model without ties."""
    model = tiny("llama", tie_word_embeddings=False)
    model.save_pretrained(folder)
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    return model


@torch.no_grad()
@pytest.mark.parametrize("way", ["LLM", "load", "quantize"])
def test_a_head_of_its_own_beside_a_tied_configuration(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "float"
    expected = _with_own_head(folder)
    made = WAYS[way](str(folder))
    assert "holds lm_head.weight, which is another tensor than the embedding" in caplog.text
    model = load(f"{folder}-out", fuse=False) if way == "quantize" else made
    assert not model.config.tie_word_embeddings
    ids = token_ids()
    found, wanted = model(ids).logits.float(), expected(ids).logits.float()
    assert float((found - wanted).norm()) < 0.2 * float(wanted.norm())


def test_a_head_that_gptq_quantized_beside_a_tied_configuration(tmp_path: Path) -> None:
    options = (32, True, 1, False)
    test_gptq.write(tmp_path, "llama", options, vocab_size=96, tie_word_embeddings=False)
    folder = tmp_path / "quantized"

    def quantize_head(state: dict[str, Tensor]) -> None:
        parts, _ = test_gptq.encoder(*options)("lm_head", state.pop("lm_head.weight").float())
        state.update({f"lm_head.{part}": value.contiguous() for part, value in parts.items()})

    edit_tensors(folder, quantize_head)
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    found = load(str(folder), fuse=False)
    assert found.lm_head.weight_packed is not None
    assert not found.config.tie_word_embeddings


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_beside_a_model(way: str, source: Path) -> None:
    (source / ADAPTER).write_text('{"peft_type": "LORA", "base_model_name_or_path": "somebody/else"}')
    _refused(way, source, "holds adapter_config.json beside a model, so that it means two models")


def test_a_base_model_without_a_head(tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=False).model.save_pretrained(tmp_path)
    for way in ("LLM", "load", "quantize"):
        _refused(way, tmp_path, "the checkpoint has no lm_head.weight")
    WAYS["pooling"](str(tmp_path))


def test_infinite_clip_bounds_and_scalars(source: Path) -> None:
    model = tiny("llama")
    bounds = {"input_min": -torch.inf, "input_max": torch.inf}
    from torch_armllm.checkpoint.loaded_values import check_small_tensors

    for name, value in bounds.items():
        model.model.norm.register_buffer(name, torch.tensor(value))
    check_small_tensors(model, lambda name: "x")
    for value in (torch.nan, torch.inf):
        model.model.norm.input_min.fill_(value)
        with pytest.raises(ValueError, match=rf"input_min in x holds {value} at \(\), and finite"):
            check_small_tensors(model, lambda name: "x")


def test_fields_that_nobody_reads() -> None:
    check_incoming(Incoming("a.gguf", fields=["a.name"], irrelevant=[r"^a\."]))
    with pytest.raises(ValueError, match=r"a\.gguf sets rope\.kind, which nobody reads"):
        check_incoming(Incoming("a.gguf", fields=["a.name", "rope.kind"], irrelevant=[r"^a\."]))


@pytest.mark.parametrize("missing", [False, True])
def test_one_file_counts_beside_an_index(source: Path, missing: bool) -> None:
    """As in transformers: the index of an earlier upload is stale, whether its files are there or not."""
    single = source / "model.safetensors"
    shard = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 4}, "weight_map": {name: shard for name in load_file(single)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    if not missing:
        save_file({name: tensor + 1 for name, tensor in load_file(single).items()}, source / shard)
    assert weight_files(str(source)) == [single]
    model = load_model(str(source), "auto")
    theirs = AutoModelForCausalLM.from_pretrained(source)
    torch.testing.assert_close(dict(model.named_parameters())[NAME], theirs.get_parameter(NAME))
