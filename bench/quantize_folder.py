"""Seconds and peak memory of quantizing a checkpoint from folder to folder.

    python -m bench.quantize_folder [--source DIR] [--quantization int4] [--method mse] [--layers 16]
        [--texts 16]

Without a source, a model of Llama 3.2 1B's shape with random BF16 weights is written to a temporary folder
first, by a process of its own.  Methods that calibrate take texts of 512 random tokens.  Sizes in the row are
in bytes, the peak counts memory that is not mapped from files, above the level after the imports.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.case import Row, run
from bench.process_memory import Peak
from torch_armllm.checkpoint import quantize_folder as product
from torch_armllm.checkpoint.block_reader import block_of
from torch_armllm.llm.calibration_text import LENGTH, SEQUENCES
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.recipe import Recipe


def write_model(folder: str, vocabulary: int, layers: int) -> None:
    """Writes the random model."""
    from bench.patch_memory import random_model

    random_model(vocabulary, layers).save_pretrained(folder, max_shard_size="1GB")


def measure(source: Path, out: Path, recipe: Recipe, calibration: Tensor | None = None) -> Row:
    """Quantizes a folder and returns the time and memory that took."""
    with Peak("RssAnon") as peak:
        start = time.perf_counter()
        report = product.quantize_folder(source, out, recipe, progress=False, calibration=calibration)
        seconds = time.perf_counter() - start
    blocks: Counter[str] = Counter()
    for layer in report.layers:
        blocks[block_of(layer.name)] += layer.bytes_before
    return {
        "seconds": seconds,
        "parameters": sum(layer.parameters for layer in report.layers),
        "float_bytes": report.bytes_before,
        "written_bytes": report.bytes_after,
        "largest_block_bytes": max(blocks.values()),
        "peak_bytes": peak.bytes - peak.before,
    }


def random_texts(count: int, vocabulary: int, length: int = LENGTH) -> Tensor:
    """Returns random token ids (count, length)."""
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def quantize_folder(
    *,
    source: Path | None = None,
    quantization: str = "int4",
    method: str = "mse",
    layers: int = 16,
    vocabulary: int = 128256,
    texts: int = SEQUENCES,
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        if source is None:
            source = Path(scratch) / "float"
            arguments = (str(source), vocabulary, layers)
            writer = multiprocessing.get_context("spawn").Process(target=write_model, args=arguments)
            writer.start()
            writer.join()
        vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        calibration = random_texts(texts, vocabulary) if method in CALIBRATED else None
        yield measure(source, Path(scratch) / "out", Recipe(quantization, method=method), calibration)


if __name__ == "__main__":
    run(quantize_folder)
