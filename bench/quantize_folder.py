"""Seconds and peak memory of quantizing a checkpoint from folder to folder.

    python -m bench.quantize_folder [--source DIR] [--quantization int4] [--method mse] [--layers 16]
        [--texts 16]

Without a source, a model of Llama 3.2 1B's shape with random BF16 weights is written to a temporary folder
first, by a process of its own.  Methods that calibrate take texts of 512 random tokens.  Prints one JSON
line; sizes are in bytes, the peak counts memory that is not mapped from files, above the level after the
imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import block_of
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.llm.calibration_text import LENGTH, SEQUENCES
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.recipe import Recipe


def write_model(folder: str, vocabulary: int, layers: int) -> None:
    """Writes the random model."""
    from bench.patch_memory import random_model

    random_model(vocabulary, layers).save_pretrained(folder, max_shard_size="1GB")


def anonymous() -> int:
    """Returns the bytes of this process's memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise KeyError("RssAnon")


class Peak(threading.Thread):
    """Thread that samples the peak memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.bytes = anonymous()
        self.done = False

    def run(self) -> None:
        """Samples a hundred times a second."""
        while not self.done:
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.01)


def measure(source: Path, out: Path, recipe: Recipe, calibration: Tensor | None = None) -> dict[str, Any]:
    """Quantizes a folder and returns the time and memory that took."""
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    report = quantize_folder(source, out, recipe, progress=False, calibration=calibration)
    seconds = time.perf_counter() - start
    peak.done = True
    peak.join()
    blocks: dict[str, int] = {}
    for layer in report.layers:
        block = block_of(layer.name)
        blocks[block] = blocks.get(block, 0) + layer.bytes_before
    return {
        "seconds": round(seconds, 1),
        "parameters": sum(layer.parameters for layer in report.layers),
        "float_bytes": report.bytes_before,
        "written_bytes": report.bytes_after,
        "largest_block_bytes": max(blocks.values()),
        "peak_bytes": peak.bytes - peak.before,
    }


def random_texts(count: int, vocabulary: int, length: int = LENGTH) -> Tensor:
    """Returns random token ids (count, length)."""
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--method", default="mse")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--texts", type=int, default=SEQUENCES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        source = options.source
        if source is None:
            source = Path(scratch) / "float"
            arguments = (str(source), options.vocabulary, options.layers)
            writer = multiprocessing.get_context("spawn").Process(target=write_model, args=arguments)
            writer.start()
            writer.join()
        config = json.loads((source / "config.json").read_text())
        calibrated = options.method in CALIBRATED
        texts = random_texts(options.texts, config["vocab_size"]) if calibrated else None
        recipe = Recipe(options.quantization, method=options.method)
        print(json.dumps(measure(source, Path(scratch) / "out", recipe, texts)))


if __name__ == "__main__":
    main()
