"""Writing of one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from torch_armllm.checkpoint.tensor_headers import sort_metadata


def write_shard(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str], mode: int | None = None
) -> None:
    """Writes a safetensors file whose bytes depend on its content alone.

    Args:
        tensors: by name.
        file: the file.
        metadata: entries of the header.
        mode: its permissions; by default those of every new file of the process.
    """
    if mode is None:
        file.touch()
        mode = file.stat().st_mode
    save_file(dict(tensors), file, dict(metadata))
    file.chmod(mode)  # safetensors writes files that only their owner can read
    sort_metadata(file)
