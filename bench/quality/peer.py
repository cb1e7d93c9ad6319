"""llama.cpp in separate processes: files from its own quantizer, logits from its own kernels."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

_SIDE = Path(__file__).with_name("llama_side.py")


@dataclass(frozen=True)
class Peer:
    """llama.cpp, run by a Python that has llama-cpp-python.

    Attributes:
        python: the interpreter.
        folder: folder for its files.
    """

    python: str
    folder: Path

    def quantize(self, source: Path, kind: str) -> Path:
        """Quantizes a float file to ``q4_0`` or ``q4_k_m``."""
        target = self.folder / f"{source.stem}-{kind}.gguf"
        with (self.folder / "quantize.log").open("w") as log:
            command = [self.python, str(_SIDE), "quantize", str(source), str(target), kind]
            subprocess.run(command, check=True, stdout=log, stderr=log)
        return target

    def logits(self, model: Path, tokens: Tensor) -> Iterator[Tensor]:
        """Yields float32 logits (length, vocabulary) of each row of tokens.

        Raises:
            RuntimeError: llama.cpp cannot run the file.
        """
        folder = self.folder / "logits"
        folder.mkdir(exist_ok=True)
        np.save(self.folder / "tokens.npy", tokens.numpy())
        command = [
            self.python,
            str(_SIDE),
            "logits",
            str(model),
            str(self.folder / "tokens.npy"),
            str(folder),
        ]
        with (self.folder / "logits.log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                for index in range(len(tokens)):
                    file = folder / f"{index}.npy"
                    while not file.exists():
                        if process.poll() is not None and not file.exists():
                            log.seek(0)
                            raise RuntimeError(f"llama.cpp stopped at {model}: {log.read()[-2000:]}")
                        time.sleep(0.01)
                    logits = torch.from_numpy(np.load(file))
                    file.unlink()
                    yield logits
            finally:
                process.kill()
                process.wait()


def stored_bits(file: Path) -> float:
    """Returns bits per weight of the linear layers of a file, appended zeros included."""
    layers = [t for t in gguf.GGUFReader(file).tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    return 8 * sum(int(t.n_bytes) for t in layers) / sum(int(t.n_elements) for t in layers)
