"""Seconds that a picture takes: transformers, and the engine.

    python -m bench.pictures [--shape 256m|500m|qwen] [--rounds 5] [--quantization int4] [--threads 2]

Models have random weights. 256m and 500m are SmolVLM's shapes, of which a picture of 512 × 512 is 1,024
patches and 64 tokens. qwen is the tower of Qwen2.5-VL 3B, with windows, before the language model of 256m; a
picture of 504 × 504 is 1,296 patches and 324 tokens. Rounds alternate between the models. Rows have medians:
of the tower with its projection, and of a prompt with one picture and 32 words up to its first token.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Literal

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
from bench.case import Row, in_rounds, run
from bench.engine_steps import greedy, timed
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.text.preprocess import NewRequest

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

    def answer(number: int) -> None:
        prompt = {"prompt": "", "multi_modal_data": {"image": processor.picture(number)}}
        engine.add_request(NewRequest(str(number), prompt, greedy(1)))
        while engine.has_unfinished_requests():
            engine.step()

    return answer


@torch.no_grad()
def pictures(
    *,
    shape: Literal["256m", "500m", "qwen"] = "256m",
    rounds: int = 5,
    quantization: str = "int4",
    threads: int = 2,
) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    kind = Qwen() if shape == "qwen" else SmolVLM()
    torch.manual_seed(0)
    own = kind.model(shape).eval().to(torch.bfloat16)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, quantization, progress=False), file=sys.stderr)
    processor = _Processor(kind)
    config = EngineConfig(kv_cache_memory=64 << 20, threads=threads, max_model_len=1024)
    engine = build_engine(patched, None, config, processor)

    def by_transformers(number: int) -> None:
        own.generate(**processor([[processor.picture(number)]]), max_new_tokens=1, do_sample=False)

    def side(model: Any, answer: Callable[[int], None]) -> Callable[[int], tuple[float, float]]:
        def seconds(number: int) -> tuple[float, float]:
            seen = processor.seen(processor.picture(number))
            return timed(lambda: model.get_image_features(**seen)), timed(lambda: answer(number))

        return seconds

    sides = {
        "transformers, bfloat16": side(own.model, by_transformers),
        f"engine, {quantization}": side(patched.model, first_token_of(engine, processor)),
    }
    for name, rows in in_rounds(sides, rounds).items():
        tower, whole = (1e3 * median(column) for column in zip(*rows, strict=True))
        yield {"model": name, "tower_ms": tower, "first_token_ms": whole}


if __name__ == "__main__":
    run(pictures)
