"""A config.json chooses neither code nor repositories, and a dtype that is none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaConfig

from tests.checkpoint.damaged_folders import edit_config
from torch_armllm import load
from torch_armllm.checkpoint.load import load_model, load_processor
from torch_armllm.checkpoint.model_config import read_config, with_overrides
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.pooling.loading import load_pooling

KERNEL = "somebody/kernel@main:attention"


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that would fetch a kernel."""

    def fetched(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"a kernel was asked for: {args}")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetched)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetched)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_implementation", KERNEL),
        ("attn_implementation", {"": KERNEL}),
        ("_attn_implementation", KERNEL),
        ("_attn_implementation", "flash_attention_2"),
        ("_attn_implementation_internal", KERNEL),
        ("experts_implementation", KERNEL),
        ("experts_implementation", "flash_attention_2"),
        ("_experts_implementation", KERNEL),
        ("_experts_implementation", {"": KERNEL}),
    ],
)
def test_choices_of_code_are_ignored(
    field: str, value: Any, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(source, lambda config: config.update({field: value}))
    config = read_config(str(source))
    assert KERNEL not in str(vars(config)) and "flash" not in str(vars(config))
    assert "chooses code outside of the model" in caplog.text or field.endswith("_internal")
    load_model(str(source))
    load(str(source), fuse=False)
    load_pooling(ModelRequest(str(source), skip_tokenizer_init=True, progress=False))


def test_choices_of_code_in_inner_configurations(tmp_path: Path) -> None:
    LlavaConfig().save_pretrained(tmp_path)

    def choose(config: dict[str, Any]) -> None:
        for part in ("text_config", "vision_config"):
            config[part].update(attn_implementation=KERNEL, _attn_implementation=KERNEL)
        config.update(attn_implementation={"text_config": KERNEL})

    edit_config(tmp_path, choose)
    config = read_config(str(tmp_path))
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is None
    config = with_overrides(str(tmp_path), config, {"attn_implementation": KERNEL})
    assert config._attn_implementation is None and config.text_config._attn_implementation is None


def test_implementations_of_transformers_stay(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(source, lambda config: config.update(attn_implementation="eager"))
    assert read_config(str(source))._attn_implementation == "eager"
    assert not caplog.text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "bad", "dtype is 'bad' in the configuration of .*, and one of bfloat16, float16"),
        ("dtype", "nn", "dtype is 'nn'"),
        ("torch_dtype", "int8", "torch_dtype is 'int8'"),
        ("dtype", 16, "dtype is 16"),
        ("dtype", ["float16"], r"dtype is \['float16'\]"),
        ("text_config", {"dtype": "bad"}, "text_config.dtype is 'bad'"),
        ("attribute_map", {"vocab_size": "hidden_size"}, "attribute_map is .*: it renames other fields"),
        ("transformers_weights", "other.safetensors", "it names another file of weights"),
        ("to_dict", 3, "to_dict is 3 in .*, and transformers has a method of this name"),
        ("__class__", "x", "__class__ is 'x'"),
        ("vision_config", {"architecture": "hf-hub:somebody/model"}, "which timm would fetch"),
        ("backbone_config", {"backbone": "local-dir:/tmp"}, "which timm would fetch"),
    ],
)
def test_fields_that_are_refused(field: str, value: Any, message: str, source: Path) -> None:
    edit_config(source, lambda config: config.update({field: value}))
    for way in (load_model, load):
        with pytest.raises(ValueError, match=message):
            way(str(source))


def test_a_processor_loads_no_other_repository(tmp_path: Path) -> None:
    named = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "somebody/else"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"audio_tokenizer": named}))
    with pytest.raises(ValueError, match="processor_config.json names the audio tokenizer 'somebody/else'"):
        load_processor(str(tmp_path))
