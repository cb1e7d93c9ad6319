"""Random tensors of GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

DEVIATION = 0.02
"""Standard deviation of random weights."""


class RandomTensors:
    """Writer of random tensors with the types that llama.cpp's own quantizer chooses for ``Q4_0`` files."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.file = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(0)

    def floats(self, name: str, *shape: int) -> None:
        """Add a float32 tensor, such as a router's."""
        values = self.random.normal(0, DEVIATION, shape).astype(np.float32)
        self.file.add_tensor(f"{name}.weight", values)

    def ones(self, name: str, size: int) -> None:
        """Add a float32 vector of ones, such as a norm's."""
        self.file.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def vector(self, name: str, *shape: int, sign: int = 0) -> None:
        """Add small float32 numbers under their full name; all positive or negative if ``sign`` says so."""
        values = self.random.normal(0, DEVIATION, shape).astype(np.float32)
        self.file.add_tensor(name, sign * np.abs(values) if sign else values)

    def blocks(self, name: str, *shape: int, head: bool = False) -> None:
        """Add a Q4_0 tensor; for a head Q6_K, or Q8_0 if rows are no multiple of Q6_K's 256."""
        kind = Type.Q4_0 if not head else Type.Q6_K if shape[-1] % 256 == 0 else Type.Q8_0
        length, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape)) // length
        data = self.random.integers(0, 256, (count, size), dtype=np.uint8)
        at, levels = {Type.Q4_0: (0, 4.6), Type.Q8_0: (0, 74.0), Type.Q6_K: (208, 18.5 * 8)}[kind]
        if kind is Type.Q6_K:
            data[:, 192:208] = 8  # all sub-blocks have the same scale
        data[:, at : at + 2] = np.array([DEVIATION / levels], np.float16).view(np.uint8)
        rows = data.reshape(*shape[:-1], shape[-1] // length * size)
        self.file.add_tensor(f"{name}.weight", rows, raw_dtype=kind)

    def close(self) -> None:
        """Write the file."""
        close(self.file)


def close(file: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
