"""Divergence that INT8 inputs of linear layers cost a model of float weights, rotated or not.

    python -m bench.quality.input_rounding --model smollm2 --text wikitext2-valid.txt [--sequences 4]

The weights stay floats, and nothing is scaled.  Each linear layer rounds its inputs as the ops do: INT8 with
one scale a token, after groups of 32 inputs were rotated by a Hadamard matrix or as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.quality.comparison import logits
from bench.quality.divergence import Divergence
from torch_armllm.checkpoint.load import load_model, load_tokenizer
from torch_armllm.llm.calibration_text import read_tokens
from torch_armllm.ops.linear import GROUP, quantize_activations, rotate_groups

Rounding = Callable[[Tensor], Tensor]
_LENGTH = 512
"""Tokens of a text."""


def rounded(x: Tensor) -> Tensor:
    """Returns inputs (…, K) rounded to INT8, one scale a token."""
    q, scale = quantize_activations(x)
    return q * scale


def rounded_rotated(x: Tensor) -> Tensor:
    """Returns inputs (…, K) that were rotated, rounded to INT8 and rotated back."""
    return rotate_groups(rounded(rotate_groups(x) / GROUP)) if x.shape[-1] % GROUP == 0 else rounded(x)


def rounding_inputs(model: nn.Module, rounding: Rounding, head: bool) -> list[Any]:
    """Lets linear layers round their inputs, the ``head`` too if told to; returns handles to end it."""
    last = model.get_output_embeddings()  # type: ignore[operator]
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and (head or m is not last)]
    return [layer.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)) for layer in layers]


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder of a float model")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--sequences", type=int, default=4, help="texts of 512 tokens")
    options = parser.parse_args()
    model = load_model(options.model, torch.float32)
    tokens = read_tokens(options.text, load_tokenizer(options.model), options.sequences, _LENGTH)
    expected = list(logits(model, tokens))
    print("| INT8 inputs | KL | same first |", "|---|---|---|", sep="\n")
    for name, rounding, head in (
        ("of all layers", rounded, True),
        ("rotated, but the head's", rounded_rotated, False),
        ("rotated", rounded_rotated, True),
    ):
        handles = rounding_inputs(model, rounding, head)
        divergence = Divergence()
        for row, one, other in zip(tokens, expected, logits(model, tokens), strict=True):
            divergence.add(one, other, row)
        for handle in handles:
            handle.remove()
        kl, same = divergence.kl, divergence.agreement
        print(f"| {name} | {kl.value:.4f} ± {kl.stderr:.4f} | {same.value:.1%} |", flush=True)


if __name__ == "__main__":
    main()
