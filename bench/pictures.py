"""Seconds that a picture or a sound takes: transformers, and the engine.

    python -m bench.pictures [--shape 256m|500m|qwen|qwen3|glm_ocr|gemma4_audio] [--rounds 5]
                             [--quantization int4] [--threads 2]

Models have random weights. 256m and 500m are SmolVLM's shapes, of which a picture of 512 × 512 is 1,024
patches and 64 tokens. qwen is the tower of Qwen2.5-VL 3B, with windows, before the language model of 256m; a
picture of 504 × 504 is 1,296 patches and 324 tokens. qwen3 is Qwen3-VL 2B, of which a picture of 512 × 512 is
1,024 patches and 256 tokens, and glm_ocr GLM-OCR, with a page of 3,168 patches and 792 tokens. gemma4_audio
is the tower for sound of Gemma 4 E2B before a language model of 256m's sizes; ten seconds are 250 tokens.
Rounds alternate between the models. Rows have medians: of the tower with its projection, and of a prompt with
one picture or sound and 32 words up to its first token.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Literal

import torch

import torch_armllm
from bench.case import Row, in_rounds, run
from bench.engine_steps import greedy, timed
from bench.media_shapes import SHAPES, Processor
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.text.preprocess import NewRequest


def first_token_of(engine: Any, kind: Any) -> Callable[[int], None]:
    """Returns a function that computes the first token after an item."""

    def answer(number: int) -> None:
        prompt = {"prompt": "", "multi_modal_data": {kind.modality: kind.item(number)}}
        engine.add_request(NewRequest(str(number), prompt, greedy(1)))
        while engine.has_unfinished_requests():
            engine.step()

    return answer


@torch.no_grad()
def pictures(
    *,
    shape: Literal["256m", "500m", "qwen", "qwen3", "glm_ocr", "gemma4_audio"] = "256m",
    rounds: int = 5,
    quantization: str = "int4",
    threads: int = 2,
) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    kind = SHAPES[shape]()
    torch.manual_seed(0)
    own = kind.model(shape).eval().to(torch.bfloat16)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, quantization, progress=False), file=sys.stderr)
    processor = Processor(kind)
    config = EngineConfig(kv_cache_memory=64 << 20, threads=threads, max_model_len=1024)
    engine = build_engine(patched, None, config, processor)

    def by_transformers(number: int) -> None:
        given = processor(kind.item(number), kind.item(number))
        own.generate(**given, max_new_tokens=1, do_sample=False)

    def side(model: Any, answer: Callable[[int], None]) -> Callable[[int], tuple[float, float]]:
        def seconds(number: int) -> tuple[float, float]:
            given, tower = kind.inputs(kind.item(number)), kind.features(model)
            return timed(lambda: tower(**given)), timed(lambda: answer(number))

        return seconds

    sides = {
        "transformers, bfloat16": side(own.model, by_transformers),
        f"engine, {quantization}": side(patched.model, first_token_of(engine, kind)),
    }
    for name, rows in in_rounds(sides, rounds).items():
        tower, whole = (1e3 * median(column) for column in zip(*rows, strict=True))
        yield {"model": name, "tower_ms": tower, "first_token_ms": whole}


if __name__ == "__main__":
    run(pictures)
