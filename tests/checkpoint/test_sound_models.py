"""Folders of models that take sound beside text load by the class that transformers has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from tests.support.models import token_ids
from torch_armllm import LLM, SamplingParams, load
from torch_armllm.checkpoint.load import auto_class, load_model
from torch_armllm.checkpoint.quantize_folder import quantize_folder

_TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WHISPER = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
_AUDIO: dict[str, dict[str, Any]] = {
    "voxtral": {**_WHISPER, "vocab_size": 97},
    "glmasr": _WHISPER,
    "qwen3_asr": {**_QWEN, "output_dim": 64, "downsample_hidden_size": 8},
    "qwen2_audio": _QWEN,
}


def _write(family: str, folder: Path) -> Any:
    """Writes a folder of a tiny random model, and returns the model."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    kind = CONFIG_MAPPING[family]
    whole = kind()
    text = {"model_type": whole.text_config.model_type, **_TEXT}
    config = kind(
        text_config=text, audio_config={"model_type": whole.audio_config.model_type, **_AUDIO[family]}
    )
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", _AUDIO)
def test_models_of_sound_and_text(family: str, tmp_path: Path) -> None:
    expected = _write(family, tmp_path / "float")
    ids = token_ids()
    wanted = expected(input_ids=ids).logits
    assert torch.equal(load_model(str(tmp_path / "float"), "auto")(input_ids=ids).logits, wanted)
    quantize_folder(tmp_path / "float", tmp_path / "packed", "int8", progress=False)
    for folder in ("float", "packed"):
        model = load(str(tmp_path / folder), "int8", fuse=False)
        found = model(input_ids=ids).logits
        assert float((found - wanted).norm()) < 0.05 * float(wanted.norm())


def test_a_model_of_sound_and_text_generates(tmp_path: Path) -> None:
    _write("voxtral", tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, progress=False)
    out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(out[0].outputs[0].token_ids) == 3
