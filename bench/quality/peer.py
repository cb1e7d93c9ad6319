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

from bench.quality.llama_kinds import Kind

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

    def quantize(self, source: Path, kind: Kind) -> Path:
        """Quantizes a float file; its importance matrix is the ``.npz`` file of the same name.

        Raises:
            RuntimeError: llama.cpp cannot quantize the file.
        """
        target = self.folder / f"{source.stem}-{kind.format}{'-imatrix' * kind.imatrix}.gguf"
        command = [self.python, str(_SIDE), "quantize", str(source), str(target), kind.format]
        if kind.imatrix:
            command.append(str(source.with_suffix(".npz")))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"llama.cpp cannot make {target.name}: {done.stdout[-2000:]}")
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
