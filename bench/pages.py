"""Seconds that a page of a batch of documents takes: transformers, and the engine.

    python -m bench.pages [--shape 256m|500m|qwen|qwen3|glm_ocr] [--pages 8] [--tokens 256] [--rounds 3]
                          [--quantization int4] [--threads 2]

Models have random weights, see `bench.pictures`. Pages are rendered text. transformers generates the text of
one page after the other, and the engine that of all pages together; each text has the same number of tokens.
Rounds alternate between the models. Rows have the median of the seconds of a page, and the tokens of text a
second.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any, Literal

import torch

import torch_armllm
from bench.case import Row, in_rounds, run
from bench.engine_steps import greedy, timed
from bench.media_shapes import PAGES, WORDS, Processor
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.text.preprocess import NewRequest


@torch.no_grad()
def pages(
    *,
    shape: Literal["256m", "500m", "qwen", "qwen3", "glm_ocr"] = "256m",
    pages: int = 8,
    tokens: int = 256,
    rounds: int = 3,
    quantization: str = "int4",
    threads: int = 2,
) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    kind: Any = PAGES[shape]()
    torch.manual_seed(0)
    own = kind.model(shape).eval().to(torch.bfloat16)
    patched = copy.deepcopy(own)
    print(torch_armllm.patch(patched, quantization, progress=False), file=sys.stderr)
    processor = Processor(kind)
    length = kind.tokens + WORDS + tokens
    config = EngineConfig(kv_cache_memory=1 << 30, threads=threads, max_model_len=length, max_num_seqs=pages)
    engine = build_engine(patched, None, config, processor)

    def by_transformers(number: int) -> None:
        for page in range(pages):
            image = kind.page(number * pages + page)
            own.generate(**processor(image), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    def by_engine(number: int) -> None:
        for page in range(number * pages, (number + 1) * pages):
            prompt = {"prompt": "", "multi_modal_data": {"image": kind.page(page)}}
            engine.add_request(NewRequest(str(page), prompt, greedy(tokens)))
        while engine.has_unfinished_requests():
            engine.step()

    sides = {
        "transformers, bfloat16": lambda number: timed(lambda: by_transformers(number)),
        f"engine, {quantization}": lambda number: timed(lambda: by_engine(number)),
    }
    for name, seconds in in_rounds(sides, rounds).items():
        one = median(seconds) / pages
        yield {"model": name, "page_s": one, "tokens_per_s": tokens / one}


if __name__ == "__main__":
    run(pages)
