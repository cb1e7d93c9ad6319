"""Seconds that a picture takes: transformers, and the engine.

    python -m bench.pictures [--shape 256m|500m] [--rounds 5] [--quantization int4] [--threads 2]

Models have random weights and SmolVLM's shapes; a picture of 512 × 512 is 1,024 patches and 64 tokens. Rounds
alternate between the models. Prints medians: of the tower with its projection, and of a prompt with one
picture and 32 words up to its first token.
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
from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

import torch_armllm
from torch_armllm import SamplingParams
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig

_TEXTS = {"256m": (576, 1536, 30, 9, 3), "500m": (960, 2560, 32, 15, 5)}
"""Width, inner width, layers, heads and key heads of the language models."""
_SIDE, _TOKENS, _WORDS = 512, 64, 32
_PICTURE = 7
"""Token id of a picture."""


def random_smolvlm(shape: str) -> Any:
    """Returns a model in bfloat16 with random weights."""
    width, inner, layers, heads, key_heads = _TEXTS[shape]
    text = LlamaConfig(
        vocab_size=49280,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        pad_token_id=2,
    )
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    config = SmolVLMConfig(
        vision_config={**tower, "num_attention_heads": 12, "image_size": _SIDE, "patch_size": 16},
        text_config=text,
        image_token_id=_PICTURE,
        scale_factor=4,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    return SmolVLMForConditionalGeneration(config).eval().to(torch.bfloat16)


class _Processor:
    """Makes the inputs of the model from pictures of the tower's size, without a tokenizer's files."""

    def __call__(self, images: list[list[Image.Image]], **_: Any) -> dict[str, Tensor]:
        pixels = torch.stack([torch.frombuffer(i.tobytes(), dtype=torch.uint8) for i in images[0]])
        shaped = pixels.view(1, -1, _SIDE, _SIDE, 3).permute(0, 1, 4, 2, 3).float() / 127.5 - 1
        ids = torch.arange(100, 100 + _WORDS)
        return {
            "input_ids": torch.cat([torch.full((_TOKENS,), _PICTURE), ids])[None],
            "pixel_values": shaped.to(torch.bfloat16),
        }


def picture(number: int) -> Image.Image:
    """Returns a picture of random pixels."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (_SIDE, _SIDE, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def first_token_of(engine: Any) -> Callable[[int], None]:
    """Returns a function that computes the first token after a picture."""
    params = SamplingParams(temperature=0, max_tokens=1)

    def run(number: int) -> None:
        prompt = {"prompt": "", "multi_modal_data": {"image": picture(number)}}
        engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            engine.step()

    return run


@torch.no_grad()
def main() -> None:
    """Measures and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="256m", choices=_TEXTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    own = random_smolvlm(options.shape)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, options.quantization, progress=False))
    processor = _Processor()
    config = EngineConfig(kv_cache_memory=64 << 20, threads=options.threads, max_model_len=1024)
    engine = build_engine(patched, None, config, processor)

    def by_transformers(number: int) -> None:
        own.generate(**processor([[picture(number)]]), max_new_tokens=1, do_sample=False)

    runs = {
        "transformers, bfloat16": by_transformers,
        f"engine, {options.quantization}": first_token_of(engine),
    }
    towers = dict(zip(runs, (own.model, patched.model), strict=True))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):  # the first round warms up
        pixels = processor([[picture(number)]])["pixel_values"]
        for name, run in runs.items():
            began = time.perf_counter()
            towers[name].get_image_features(pixels)
            seen = time.perf_counter()
            run(number)
            if number:
                times[name].append((seen - began, time.perf_counter() - seen))
    for name, rows in times.items():
        tower, whole = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:24} tower {tower:7.1f} ms, first token {whole:7.1f} ms")


if __name__ == "__main__":
    main()
