"""Seconds of audio that a Whisper transcribes in a second: transformers, and patched.

    python -m bench.transcribe [--shape tiny|base|small] [--tokens 100] [--rounds 5] [--quantization auto]

Models have random weights and OpenAI's shapes. A call has one window of 30 seconds, whose features are
random, and makes a fixed number of tokens; people say about 100 in that time. Rounds alternate between the
models. Rows have medians: of the whole call as a multiple of real time, of the encoder, and of a decoded
token.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import torch_armllm
from bench.case import Row, in_rounds, run
from bench.engine_steps import timed

WINDOW, FRAMES = 30.0, 3000
_SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
"""Width, layers of each stack, and heads."""


def random_whisper(shape: str) -> Any:
    """Returns a model in bfloat16 with random weights."""
    width, layers, heads = _SHAPES[shape]
    config = WhisperConfig(
        vocab_size=51865,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config).eval().to(torch.bfloat16)


def measure(model: Any, features: Tensor, tokens: int) -> tuple[float, float]:
    """Returns seconds of the encoder, and of a whole call."""
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    encoder = timed(lambda: model.get_encoder()(features))
    return encoder, timed(lambda: model.generate(features, **settings))


@torch.no_grad()
def transcribe(
    *,
    shape: Literal["tiny", "base", "small"] = "base",
    tokens: int = 100,
    rounds: int = 5,
    quantization: str = "auto",
) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    own = random_whisper(shape)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, quantization, progress=False), file=sys.stderr)
    models = {"transformers, bfloat16": own, f"patched, {quantization}": patched}
    features = torch.randn(1, own.config.num_mel_bins, FRAMES).to(torch.bfloat16)
    sides = {name: lambda _, model=model: measure(model, features, tokens) for name, model in models.items()}
    for name, rows in in_rounds(sides, rounds).items():
        encoder, whole = (median(column) for column in zip(*rows, strict=True))
        rates = {"times_real_time": WINDOW / whole, "encoder_ms": 1e3 * encoder}
        yield {"model": name, **rates, "token_ms": 1e3 * (whole - encoder) / tokens}


if __name__ == "__main__":
    run(transcribe)
