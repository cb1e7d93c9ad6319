"""Seconds of audio that a Whisper transcribes in a second: transformers, and patched.

    python -m bench.transcribe [--shape tiny|base|small] [--tokens 100] [--rounds 5] [--quantization auto]

Models have random weights and OpenAI's shapes. A call has one window of 30 seconds, whose features are
random, and makes a fixed number of tokens; people say about 100 in that time. Rounds alternate between the
models. Prints medians: of the whole call as a multiple of real time, of the encoder, and of a decoded token.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import torch_armllm

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
    began = time.perf_counter()
    model.get_encoder()(features)
    encoded = time.perf_counter()
    model.generate(features, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return encoded - began, time.perf_counter() - encoded


@torch.no_grad()
def main() -> None:
    """Measures and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="base", choices=_SHAPES)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto", help="scheme of the patched copy")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    own = random_whisper(options.shape)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, options.quantization, progress=False))
    models = {"transformers, bfloat16": own, f"patched, {options.quantization}": patched}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    features = torch.randn(1, own.config.num_mel_bins, FRAMES).to(torch.bfloat16)
    for number in range(options.rounds + 1):  # the first round warms up
        for name, model in models.items():
            found = measure(model, features, options.tokens)
            if number:
                times[name].append(found)
    for name, rows in times.items():
        encoder, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{name:24} {WINDOW / whole:6.1f} × real time, encoder {1e3 * encoder:6.1f} ms, "
            f"{1e3 * (whole - encoder) / options.tokens:6.2f} ms/token"
        )


if __name__ == "__main__":
    main()
