"""Importance matrix of llama.cpp: mean squared inputs of every linear layer over the calibration texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from bench.gguf_writer import LLAMA_NAMES

Importance = dict[str, Any]
"""Mean squares, float32 (in_features,), by the tensor's name in a GGUF file."""


@torch.no_grad()
def importance(model: Any, tokens: Tensor) -> Importance:
    """Runs a float Llama model over texts and returns the mean squared inputs of its layers' weights.

    Args:
        model: with float weights; llama.cpp's order of rows does not matter, as columns keep theirs.
        tokens: ids (texts, length).
    """
    sums = {
        _file_name(name): torch.zeros(module.in_features, dtype=torch.float64)
        for name, module in model.named_modules()
        if _is_layers(name, module)
    }
    hooks = [
        module.register_forward_pre_hook(_add_to(sums[_file_name(name)]))
        for name, module in model.named_modules()
        if _is_layers(name, module)
    ]
    try:
        for row in tokens:
            model.base_model(row[None])
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (total / tokens.numel()).float().numpy() for name, total in sums.items()}


def save(matrix: Importance, file: Path, model: Path) -> None:
    """Writes a matrix as ``.npz`` for a float GGUF file.

    Args:
        matrix: the matrix.
        file: file to write.
        model: the GGUF file; llama.cpp would quantize its tensors that the matrix lacks without a word.

    Raises:
        ValueError: a tensor of the layers is not in the matrix or has rows of another size.
    """
    check(matrix, {t.name: int(t.shape[0]) for t in gguf.GGUFReader(model).tensors if len(t.shape) == 2})
    np.savez(file, **matrix)


def check(matrix: Importance, rows: Mapping[str, int]) -> None:
    """Raises an error unless a matrix fits the tensors of a model's layers.

    Args:
        matrix: the matrix.
        rows: values in a row of each tensor of the file that is a matrix.

    Raises:
        ValueError: an entry is missing, has another size or is not finite.
    """
    for name, size in rows.items():
        if not name.startswith("blk."):
            continue
        if name not in matrix:
            raise ValueError(f"the importance matrix lacks {name}, which llama.cpp would quantize without it")
        if matrix[name].shape != (size,):
            raise ValueError(
                f"{name} has rows of {size} values, but importance of shape {matrix[name].shape}"
            )
        if not np.isfinite(matrix[name]).all():
            raise ValueError(f"the importance of {name} is not finite: does the float model overflow?")


def _is_layers(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("model.layers.")


def _file_name(name: str) -> str:
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LLAMA_NAMES[part]}.weight"


def _add_to(total: Tensor) -> Callable[[nn.Module, tuple[Tensor]], None]:
    def add(_: nn.Module, inputs: tuple[Tensor]) -> None:
        total.add_(inputs[0].double().square().sum(dim=(0, 1)))

    return add
