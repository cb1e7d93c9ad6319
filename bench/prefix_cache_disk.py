r"""First token of a long conversation after a restart, with and without a prefix cache on disk.

    python -m bench.prefix_cache_disk [--model smollm2] [--tokens 8000] [--ranks 1] [--stages 1] \
        [--only first,decode,files]

``first``: a process computes a conversation and ends. Further processes load the model and continue it by 20
tokens: without the folder, with it, and with it after its files were dropped from the system's page cache.
Prints the seconds from the request, two seconds after the model is loaded, to the first token.

``decode``: a sequence decodes while the blocks of a conversation that has just ended are written. Prints the
time of a token with and without a folder, in several rounds.

``files``: writes and reads the blocks of a conversation in files of 1, 4 and 16 blocks.

``--model`` is ``smollm2``, a folder, or a shape of `torch_armllm.benchmark.model_shapes` such as
``llama-3.2-1b``, which gets random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from torch_armllm import LLM, SamplingParams
from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.kv_cache.disk.record import Identity, Section, fill, write_record
from torch_armllm.kv_cache.disk.rows import Rows

_TURN = 20
"""Tokens by which a conversation goes on."""
_PAUSE = 2.0
"""Seconds between the start of an engine and its first request."""
_ROUNDS = 5
_PAIRS = 9
_WINDOW = 2.0
"""Seconds of decoding after a conversation has ended."""


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size, for first and decode")
    parser.add_argument("--stages", type=int, default=1, help="pipeline_parallel_size, likewise")
    parser.add_argument("--dir", type=Path, help="folder of the cache; default: a temporary one")
    parser.add_argument("--only", default="first,decode,files")
    parser.add_argument("--child", choices=("begin", "continue"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.dir = options.dir or Path(scratch) / "cache"
        options.model = _folder_of(options.model, Path(scratch))
        for name in options.only.split(","):
            {"first": first, "decode": decode, "files": files}[name](options)


def _folder_of(model: str, scratch: Path) -> str:
    if model not in SHAPES:
        return model
    save_random_model(shape_of(model), scratch / model)
    return str(scratch / model)


def _llm(options: argparse.Namespace, folder: Path | None) -> LLM:
    settings: dict[str, Any] = {} if folder is None else {"prefix_cache_dir": folder}
    return LLM(
        options.model,
        skip_tokenizer_init=True,
        progress=False,
        max_num_seqs=4,
        speculative_config=None,
        tensor_parallel_size=options.ranks,
        pipeline_parallel_size=options.stages,
        **settings,
    )


def _conversation(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40000) for _ in range(tokens)]


def run_child(options: argparse.Namespace) -> None:
    """Times the first token of a conversation, in a process of its own."""
    folder = None if str(options.dir) == "none" else options.dir
    llm = _llm(options, folder)
    tokens = _conversation(options.tokens)
    if options.child == "continue":
        tokens += _conversation(_TURN, 1)
    time.sleep(_PAUSE)
    began = time.perf_counter()
    (output,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    first = time.perf_counter() - began
    flushed = 0.0
    if llm.llm_engine.disk is not None:
        began = time.perf_counter()
        llm.llm_engine.disk.flush()
        flushed = time.perf_counter() - began
    answer = output.outputs[0].token_ids
    print(
        json.dumps({"first": first, "flush": flushed, "cached": output.num_cached_tokens, "answer": answer})
    )


def _child(options: argparse.Namespace, child: str, folder: Path | None) -> dict[str, Any]:
    arguments = ["--model", options.model, "--tokens", str(options.tokens), "--dir", str(folder or "none")]
    arguments += ["--ranks", str(options.ranks), "--stages", str(options.stages)]
    command = [sys.executable, "-m", "bench.prefix_cache_disk", *arguments, "--child", child]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def first(options: argparse.Namespace) -> None:
    """Prints first tokens after a restart."""
    begun = _child(options, "begin", options.dir)
    kept = [path for path in options.dir.rglob("*.safetensors")]
    size = sum(path.stat().st_size for path in kept)
    print(f"computed {options.tokens} tokens: first token after {begun['first']:.2f} s")
    print(f"wrote {len(kept)} files of {size / 1e6:.0f} MB in {begun['flush']:.2f} s after the answer")
    without = _child(options, "continue", None)
    print(f"restart without the folder: first token after {without['first']:.2f} s")
    for cold in (False, True):
        times = []
        for _ in range(_ROUNDS):
            if cold:
                _drop(kept)
            found = _child(options, "continue", options.dir)
            assert found["answer"] == without["answer"]
            times.append(found["first"])
        print(
            f"restart with the folder{', page cache dropped' if cold else ''}: first token after "
            f"{statistics.median(times):.3f} s ({_listed(times)} ms), {found['cached']} tokens cached: "
            f"{without['first'] / statistics.median(times):.0f} times sooner"
        )


def _drop(paths: list[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def decode(options: argparse.Namespace) -> None:
    """Prints the time of decoded tokens while blocks are written."""
    engines = {"without": _llm(options, None), "with": _llm(options, options.dir / "decode")}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(_PAIRS):
        for name in sorted(engines, reverse=bool(round_ % 2)):
            times[name].append(_decode(engines[name], min(2000, options.tokens), round_))
    disk = engines["with"].llm_engine.disk
    assert disk is not None
    disk.flush()
    written = disk.counts().bytes_written
    for name, each in times.items():
        print(f"{name:>8} a folder: {1e3 * statistics.median(each):.2f} ms a token, {_listed(each)}")
    ratio = statistics.median(times["with"]) / statistics.median(times["without"])
    print(f"{100 * (ratio - 1):+.1f} %; {written / 1e6:.0f} MB written, in part after the measured seconds")


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * each:.2f}" for each in seconds)


def _decode(llm: LLM, tokens: int, seed: int) -> float:
    """Returns the seconds of a token from the end of a conversation's prompt on."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    engine.add_request("decodes", _conversation(100, 100 + seed), params)
    engine.add_request("ends", _conversation(tokens, 200 + seed), SamplingParams(max_tokens=1))
    while not any(output.finished for output in engine.step()):
        pass
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < _WINDOW:
        engine.step()
        steps += 1
    spent = time.perf_counter() - began
    engine.abort_request("decodes")
    if engine.disk is not None:
        engine.disk.flush()  # not in the time of the next round
    return spent / steps


def files(options: argparse.Namespace) -> None:
    """Prints the time to write and to read blocks in files of several sizes."""
    llm = _llm(options, None)
    rows = Rows(llm.llm_engine.runner.cache)  # type: ignore[attr-defined]
    count = options.tokens // 32
    nothing, identity = np.zeros(rows.nbytes, np.uint8), Identity("0" * 32, bytes(20))
    print(f"{count} blocks of {rows.nbytes / 1e6:.2f} MB")
    for each in (1, 4, 16):
        folder = options.dir / f"files-{each}"
        folder.mkdir(parents=True)
        began = time.perf_counter()
        paths = [folder / f"{number}.safetensors" for number in range(-(-count // each))]
        for path in paths:
            write_record(path, identity, [Section("block", (each, rows.nbytes))], [nothing] * each)
        wrote = time.perf_counter()
        buffer = np.empty(each * rows.nbytes, np.uint8)
        for path in paths:
            with path.open("rb", buffering=0) as file:
                file.seek(256)
                fill(file, buffer[: path.stat().st_size - 256])
        read = time.perf_counter()
        print(f"{each:3d} blocks a file: written in {wrote - began:.2f} s, read in {read - wrote:.3f} s")


if __name__ == "__main__":
    main()
