"""Texts that a decoder embeds in a second, by transformers and patched, and the cosine between their vectors.

    python -m bench.embed_texts [--layers 28] [--texts 16] [--rounds 5] [--quantization auto,int4]

The model has random weights and the shape of Qwen3-Embedding-0.6B; texts have 20 to 200 random tokens and are
padded on the left. Rounds alternate between a bfloat16 model and its patched copies. Prints the medians, and
the least cosine of a text's vectors, of which random weights make more of rounding than trained ones.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, Qwen3Config

import torch_armllm

LONGEST, SHORTEST, VOCABULARY = 200, 20, 32000


def random_embedder(layers: int) -> Any:
    """Returns a model of random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
    )
    return AutoModel.from_config(config, dtype=torch.bfloat16).eval()


def random_texts(count: int) -> dict[str, Tensor]:
    """Returns token ids and the attention mask of texts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(SHORTEST, LONGEST, (count,), generator=generator)
    mask = (torch.arange(LONGEST) >= LONGEST - lengths[:, None]).long()
    return {
        "input_ids": mask * torch.randint(1, VOCABULARY, mask.shape, generator=generator),
        "attention_mask": mask,
    }


@torch.no_grad()
def main() -> None:
    """Measures and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto,int4", help="schemes of the patched copies")
    options = parser.parse_args()
    models = {"transformers, bfloat16": random_embedder(options.layers)}
    for name in options.quantization.split(","):
        models[f"patched, {name}"] = patched = copy.deepcopy(models["transformers, bfloat16"])
        torch_armllm.patch(patched, name, progress=False)
    texts = random_texts(options.texts)
    rates: dict[str, list[float]] = {name: [] for name in models}
    vectors: dict[str, Tensor] = {}
    for number in range(options.rounds + 1):  # the first round warms up
        for name, model in models.items():
            begin = time.perf_counter()
            vectors[name] = model(**texts, use_cache=False).last_hidden_state[:, -1].float()
            if number:
                rates[name].append(options.texts / (time.perf_counter() - begin))
    own = vectors["transformers, bfloat16"]
    for name, found in rates.items():
        cosine = float(torch.cosine_similarity(vectors[name], own).min())
        print(f"{name:24} {statistics.median(found):7.2f} texts/s, cosine {cosine:.4f}")


if __name__ == "__main__":
    main()
