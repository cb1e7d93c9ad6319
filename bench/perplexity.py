"""Perplexity of a text in BF16 and in INT4 schemes (`none`: not quantized).

    python -m bench.perplexity --text FILE [--model smollm2] [--tokens 3072] [--quantization int4,g32,row]
        [--no-importance] [--kv-cache-dtype int8]

Prints one line per scheme: perplexity, its ratio to BF16, and the mean relative round-trip error of the
linear layers.  The text is cut into windows of 1024 tokens.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

import torch_armllm
from torch_armllm import Recipe
from torch_armllm.checkpoint.load import load_model, load_tokenizer

WINDOW = 1024


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """Returns the perplexity of tokens ``(n,)``, window by window."""
    windows = [w for w in ids.split(WINDOW) if len(w) > 1]
    losses = [float(model(w[None], labels=w[None]).loss) * (len(w) - 1) for w in windows]
    return math.exp(sum(losses) / sum(len(w) - 1 for w in windows))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--quantization", default="int4,g32,row")
    parser.add_argument("--no-importance", action="store_true", help="search scales without input importance")
    parser.add_argument("--kv-cache-dtype", help="dtype of keys and values; default: the model's")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0, : options.tokens]
    model = load_model(options.model, torch.bfloat16, progress=False)
    baseline = perplexity(model, ids)
    print(f"bf16  {baseline:8.3f}", flush=True)
    for scheme in options.quantization.split(","):
        model = load_model(options.model, torch.bfloat16, progress=False)
        report = torch_armllm.patch(
            model,
            None if scheme == "none" else Recipe(scheme, importance=not options.no_importance),
            progress=False,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        errors = [
            layer.error for layer in report.layers if layer.kind == "linear" and layer.error is not None
        ]
        quantized = perplexity(model, ids)
        mean = sum(errors) / max(len(errors), 1)
        print(f"{scheme:5} {quantized:8.3f}  {quantized / baseline:.3f} x  error {mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
