"""Seconds that a picture takes: transformers, and the engine.

    python -m bench.pictures [--shape 256m|500m|qwen] [--rounds 5] [--quantization int4] [--threads 2]

Models have random weights. 256m and 500m are SmolVLM's shapes, of which a picture of 512 × 512 is 1,024
patches and 64 tokens. qwen is the tower of Qwen2.5-VL 3B, with windows, before the language model of 256m; a
picture of 504 × 504 is 1,296 patches and 324 tokens. Rounds alternate between the models. Prints medians: of
the tower with its projection, and of a prompt with one picture and 32 words up to its first token.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

import torch_armllm
from torch_armllm import SamplingParams
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig

_TEXTS = {"256m": (576, 1536, 30, 9, 3), "500m": (960, 2560, 32, 15, 5)}
"""Width, inner width, layers, heads and key heads of the language models."""
_WORDS = 32
_PICTURE = 7
"""Token id of a picture."""


class SmolVLM:
    """Inputs of a SmolVLM from pictures of the tower's size, without a tokenizer's files."""

    side, tokens = 512, 64

    def inputs(self, pixels: Tensor) -> dict[str, Tensor]:
        """Returns those of the tower from a picture ``(3, side, side)``."""
        return {"pixel_values": pixels[None, None]}

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        config = SmolVLMConfig(
            vision_config={**tower, "num_attention_heads": 12, "image_size": self.side, "patch_size": 16},
            text_config=LlamaConfig(**text_settings(shape)),
            image_token_id=_PICTURE,
            scale_factor=4,
            pad_token_id=2,
        )
        return SmolVLMForConditionalGeneration(config)


class Qwen:
    """Inputs of a Qwen2.5-VL, as `SmolVLM`."""

    side, tokens = 504, 324
    _patch, _merged = 14, 2

    def inputs(self, pixels: Tensor) -> dict[str, Tensor]:
        """Returns those of the tower: patches in the order in which it merges them, each twice in time."""
        across = self.side // self._patch // self._merged
        grid = pixels.view(3, across, self._merged, self._patch, across, self._merged, self._patch)
        patches = grid.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, self._patch**2)
        size = self.side // self._patch
        return {
            "pixel_values": patches.repeat(1, 1, 2, 1).flatten(1),
            "image_grid_thw": torch.tensor([[1, size, size]]),
        }

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        text = text_settings("256m")
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        rotary = {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half // 4, *[half * 3 // 8] * 2],
        }
        config = Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rotary},
            vision_config={"hidden_size": 1280, "out_hidden_size": text["hidden_size"], "depth": 32},
            image_token_id=_PICTURE,
            tie_word_embeddings=False,
        )
        return Qwen2_5_VLForConditionalGeneration(config)


def text_settings(shape: str) -> dict[str, Any]:
    """Returns the settings of a language model."""
    width, inner, layers, heads, key_heads = _TEXTS[shape]
    return {
        "vocab_size": 49280,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "pad_token_id": 2,
    }


class _Processor:
    """A processor of one picture and some words.

    Args:
        kind: makes the inputs of the tower.
    """

    def __init__(self, kind: SmolVLM | Qwen) -> None:
        self._kind = kind

    def __call__(self, images: list[list[Image.Image]], **_: Any) -> dict[str, Tensor]:
        ids = torch.cat([torch.full((self._kind.tokens,), _PICTURE), torch.arange(100, 100 + _WORDS)])[None]
        given = {"input_ids": ids, **self.seen(images[0][0])}
        if isinstance(self._kind, Qwen):
            given["mm_token_type_ids"] = (ids == _PICTURE).int()
        return given

    def seen(self, image: Image.Image) -> dict[str, Tensor]:
        """Returns the inputs of the tower."""
        side = self._kind.side
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(side, side, 3)
        return self._kind.inputs((pixels.permute(2, 0, 1).float() / 127.5 - 1).to(torch.bfloat16))

    def picture(self, number: int) -> Image.Image:
        """Returns a picture of random pixels."""
        generator = torch.Generator().manual_seed(number)
        size = (self._kind.side, self._kind.side, 3)
        return Image.fromarray(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).numpy())


def first_token_of(engine: Any, processor: _Processor) -> Callable[[int], None]:
    """Returns a function that computes the first token after a picture."""
    params = SamplingParams(temperature=0, max_tokens=1)

    def run(number: int) -> None:
        prompt = {"prompt": "", "multi_modal_data": {"image": processor.picture(number)}}
        engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()

    return run


@torch.no_grad()
def main() -> None:
    """Measures and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="256m", choices=(*_TEXTS, "qwen"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    kind = Qwen() if options.shape == "qwen" else SmolVLM()
    torch.manual_seed(0)
    own = kind.model(options.shape).eval().to(torch.bfloat16)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, options.quantization, progress=False))
    processor = _Processor(kind)
    config = EngineConfig(kv_cache_memory=64 << 20, threads=options.threads, max_model_len=1024)
    engine = build_engine(patched, None, config, processor)

    def by_transformers(number: int) -> None:
        own.generate(**processor([[processor.picture(number)]]), max_new_tokens=1, do_sample=False)

    runs = {
        "transformers, bfloat16": by_transformers,
        f"engine, {options.quantization}": first_token_of(engine, processor),
    }
    towers = dict(zip(runs, (own.model, patched.model), strict=True))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):  # the first round warms up
        seen = processor.seen(processor.picture(number))
        for name, run in runs.items():
            began = time.perf_counter()
            towers[name].get_image_features(**seen)
            saw = time.perf_counter()
            run(number)
            if number:
                times[name].append((saw - began, time.perf_counter() - saw))
    for name, rows in times.items():
        tower, whole = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:24} tower {tower:7.1f} ms, first token {whole:7.1f} ms")


if __name__ == "__main__":
    main()
