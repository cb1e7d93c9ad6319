"""A tiny model of texts and sound, saved with a processor that is made here, and sounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from tests.support.tokenizers import whole_words

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}"
    " {{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %} assistant :"
)
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
_WORDS = ["what", "is", "said", "?", ":", "user", "assistant", *(f"w{number}" for number in range(90))]
_IDS = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS])}
RATE = 16_000


def sound(number: int, seconds: float = 1.0, rate: int = RATE) -> NDArray[np.float32]:
    """Returns noise and a tone, float32 ``(samples,)``."""
    count = round(seconds * rate)
    noise = np.random.default_rng(number).normal(0.0, 0.1, count)
    tone = 0.3 * np.sin(np.arange(count) * (2 * np.pi * 200 * (number + 1) / rate))
    return (noise + tone).astype(np.float32)


def sound_folder(folder: Path, chat_template: str = TEMPLATE) -> Path:
    """Saves a random Qwen2-Audio, whose clips have at most two seconds, and its processor."""
    torch.manual_seed(1)
    config = Qwen2AudioConfig(
        audio_config={
            **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
            **{"num_mel_bins": 16, "max_source_positions": 100},
        },
        text_config={
            **{"model_type": "qwen2", "vocab_size": len(_IDS), "hidden_size": 64, "intermediate_size": 96},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 512, "tie_word_embeddings": False},
            **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
        },
        audio_token_index=_IDS["<|AUDIO|>"],
    )
    model = Qwen2AudioForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    tokenizer = whole_words(_IDS, _SPECIAL[4:])
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=chat_template).save_pretrained(folder)
    return folder
