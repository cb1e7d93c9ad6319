"""A tiny random Whisper in a folder, with its processor, and audio to transcribe."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MEL = 16
_TIMES = [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
_SPECIAL = [
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]


def whisper_folder(folder: Path) -> Path:
    """Writes a checkpoint whose weights are random, norms and biases included; it knows two languages."""
    vocabulary = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.add_tokens(_TIMES)
    ids: dict[str, int] = {token: tokenizer.convert_tokens_to_ids(token) for token in [*_SPECIAL, _TIMES[0]]}
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    own: dict[str, Any] = {"decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end}
    own["pad_token_id"] = end
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=_MEL,
        max_target_positions=64,
        begin_suppress_tokens=[],
        suppress_tokens=[],
        **own,
    )
    random = torch.Generator().manual_seed(3)
    model = WhisperForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        scale = 0.3 if parameter.dim() == 1 else 0.5 if "emb" in name else parameter[0].numel() ** -0.5
        parameter.data = noise * scale + (parameter.dim() == 1 and "weight" in name)
    model.generation_config = GenerationConfig(
        **own,
        is_multilingual=True,
        lang_to_id={name: ids[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        max_length=60,
        return_timestamps=False,
        prev_sot_token_id=ids["<|startofprev|>"],
    )
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=_MEL), tokenizer).save_pretrained(folder)
    return folder


def sound(seconds: float, rate: int = 16000, channels: int = 1, kind: str = "WAV") -> bytes:
    """Returns a file of tones and noise."""
    random = np.random.default_rng(5)
    times = np.arange(int(seconds * rate)) / rate
    wave = 0.3 * np.sin(2 * np.pi * (200 + 50 * np.sin(times)) * times) + 0.05 * random.standard_normal(
        len(times)
    )
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, 1), rate, format=kind)
    return file.getvalue()
