"""Perplexity of a text in BF16 and in INT4 schemes (`none`: not quantized).

    python -m bench.perplexity --text FILE [--model smollm2] [--tokens 3072] [--quantization int4,g32,row]
        [--no-importance] [--kv-cache-dtype int8]

A row for each scheme has the perplexity, its ratio to BF16, and the mean relative round-trip error of the
linear layers.  The text is cut into windows of 1024 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch

import torch_armllm
from bench.case import Row, run
from torch_armllm import Recipe
from torch_armllm.checkpoint.load import load_model, load_tokenizer

WINDOW = 1024


@torch.no_grad()
def perplexity_of(model: Any, ids: torch.Tensor) -> float:
    """Returns the perplexity of tokens ``(n,)``, window by window."""
    windows = [w for w in ids.split(WINDOW) if len(w) > 1]
    losses = [float(model(w[None], labels=w[None]).loss) * (len(w) - 1) for w in windows]
    return math.exp(sum(losses) / sum(len(w) - 1 for w in windows))


def perplexity(
    *,
    text: Path,
    model: str = "smollm2",
    tokens: int = 3072,
    quantization: tuple[str, ...] = ("int4", "g32", "row"),
    no_importance: Annotated[bool, "search scales without input importance"] = False,
    kv_cache_dtype: Annotated[str | None, "dtype of keys and values; default: the model's"] = None,
) -> Iterator[Row]:
    ids = load_tokenizer(model)(text.read_text(), return_tensors="pt").input_ids[0, :tokens]
    baseline = perplexity_of(load_model(model, torch.bfloat16, progress=False), ids)
    yield {"scheme": "bf16", "perplexity": baseline}
    for scheme in quantization:
        recipe = None if scheme == "none" else Recipe(scheme, importance=not no_importance)
        patched = load_model(model, torch.bfloat16, progress=False)
        report = torch_armllm.patch(patched, recipe, progress=False, kv_cache_dtype=kv_cache_dtype)
        errors = [each.error for each in report.layers if each.kind == "linear" and each.error is not None]
        found = perplexity_of(patched, ids)
        row = {"scheme": scheme, "perplexity": found, "ratio": found / baseline}
        yield row | ({"error": mean(errors)} if errors else {})


if __name__ == "__main__":
    run(perplexity)
