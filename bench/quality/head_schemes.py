"""Loss of an output head in INT8, 6 and 4 bits, with all other weights in float32.

    python -m bench.quality.head_schemes --model FOLDER --text FILE [--tokens 4096]

Prints the bits of a weight, its relative round-trip error, the mean divergence (KL, in nats a token, and its
standard error) from the float head, and the share of equal most probable tokens; activations stay float.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_armllm.quant.schemes.registry import scheme_named

SCHEMES = ("int8", "int6", "g32i")
WINDOW = 512  # tokens of a text


def hidden_states(folder: str, text: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the inputs (tokens, K) and the weight (N, K) of the output head, float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    assert len(ids) >= tokens, f"the text has {len(ids)} tokens; {tokens} are needed"
    windows = ids[: tokens // WINDOW * WINDOW].view(-1, WINDOW)
    rows = [model.base_model(window[None]).last_hidden_state[0] for window in windows]
    return torch.cat(rows), model.get_output_embeddings().weight.detach()


@torch.no_grad()
def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a float model")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    hidden, weight = hidden_states(options.model, options.text.read_text(), options.tokens)
    exact = (hidden @ weight.t()).log_softmax(-1)
    print("scheme", "bits", "error", "KL", "±", "top-1", sep="\t")
    for name in SCHEMES:
        scheme = scheme_named(name)
        quantized, error = scheme.quantize(weight)
        rounded = (hidden @ scheme.dequantize(quantized).t()).log_softmax(-1)
        divergence = (exact.exp() * (exact - rounded)).sum(-1)
        deviation = float(divergence.std() / len(divergence) ** 0.5)
        same = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
        figures = f"{scheme.bits(weight.shape[1]):.2f}", f"{error:.4f}", f"{float(divergence.mean()):.4f}"
        print(name, *figures, f"{deviation:.4f}", f"{same:.3f}", sep="\t", flush=True)


if __name__ == "__main__":
    main()
