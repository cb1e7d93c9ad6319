"""From a model's name and a scheme to something that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_armllm
from torch_armllm import quant
from torch_armllm.checkpoint import load_model, load_tokenizer
from torch_armllm.evaluation.scheme import Scheme
from torch_armllm.report import LayerRecord


def load_scheme(
    source: str,
    scheme: Scheme,
    dtype: str = "auto",
    calibration: Tensor | None = None,
    progress: bool = False,
) -> tuple[Any, list[LayerRecord]]:
    """Loads a model in a scheme.

    Args:
        source: see `torch_armllm.checkpoint.load_model`.
        scheme: how it is to run.
        dtype: of the weights that are loaded, where the scheme does not say.
        calibration: token ids ``(sequences, length)`` for methods that calibrate.
        progress: shows bars.

    Returns:
        The model, and what became of its layers.
    """
    wanted = scheme.dtype or dtype
    model = load_model(source, wanted if wanted == "auto" else getattr(torch, wanted), progress=progress)
    if not scheme.patched:
        return model, quant.describe(model, "nothing is quantised")
    if torch_armllm.is_patched(model):
        return model, quant.describe(model, "nothing is quantised")
    said: dict[str, Any] = {} if scheme.method is None else {"method": scheme.method}
    if scheme.calibrated:
        said["calibration"] = calibration
    report = torch_armllm.patch(model, scheme.quantize, progress=progress, **said)
    return model, report.layers


def bits_of(layers: list[LayerRecord]) -> float:
    """Bits a weight of all layers with a weight matrix, the head among them and embeddings not."""
    return 8 * sum(layer.bytes_after for layer in layers) / max(sum(layer.parameters for layer in layers), 1)


def calibration_tokens(source: str, file: Path, sequences: int = 64, length: int = 512) -> Tensor:
    """The beginning of a text as token ids ``(sequences, length)``, fewer where it is short.

    Raises:
        ValueError: the text is shorter than one sequence.
        OSError: it cannot be read.
    """
    text = file.read_text(encoding="utf-8")[: sequences * length * 16]
    ids = load_tokenizer(source)(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    count = min(len(ids) // length, sequences)
    if count == 0:
        raise ValueError(f"{file} has {len(ids)} tokens; calibration takes {length} at least")
    return torch.as_tensor(ids[: count * length]).view(count, length)
