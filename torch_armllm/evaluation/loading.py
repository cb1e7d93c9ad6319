"""From a model's name and a scheme to something that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_armllm.checkpoint.load import load_model
from torch_armllm.evaluation.off_grid import move_off_grid
from torch_armllm.evaluation.variant import Scheme
from torch_armllm.llm.calibration_text import calibration_tokens
from torch_armllm.patching.patch import patch
from torch_armllm.patching.state import is_patched
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.inspection import describe, is_packed
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord


def load_scheme(
    source: str,
    scheme: Scheme,
    dtype: str = "auto",
    calibration: Path | None = None,
    off_grid: bool = False,
    progress: bool = False,
) -> tuple[Any, list[LayerRecord]]:
    """Loads a model in a scheme.

    Args:
        source: see `torch_armllm.checkpoint.load.load_model`.
        scheme: how it is to run.
        dtype: of the weights that are loaded, where the scheme does not say.
        calibration: a text for methods that calibrate; without it the model writes its own.
        off_grid: see `move_off_grid`.
        progress: shows bars.

    Returns:
        The model, and what became of its layers.

    Raises:
        ValueError: the checkpoint is quantized already, and otherwise than the scheme says; or the text to
            calibrate with is too short.
    """
    wanted = scheme.dtype or dtype
    chosen = wanted if wanted == "auto" else getattr(torch, wanted)
    model = load_model(source, chosen, progress=progress, dequantize=not scheme.saved)
    if is_packed(model):
        _check_packed(model, scheme)
    elif off_grid:
        move_off_grid(model)
    if is_patched(model) or not scheme.patched:
        return model, describe(model, "nothing is quantized")
    recipe = (
        None if scheme.quantization is None else Recipe(scheme.quantization, method=scheme.method or "mse")
    )
    tokens = calibration_tokens(source, calibration) if scheme.calibrated else None
    report = patch(model, recipe, progress=progress, calibration=tokens)
    return model, report.layers


def _check_packed(model: Any, scheme: Scheme) -> None:
    config = getattr(model.config, "quantization_config", None)
    own = config.recipe.scheme if isinstance(config, ArmInt4Config) else None
    if not scheme.patched or (scheme.quantization is not None and scheme.quantization != own):
        raise ValueError(
            f"the checkpoint is quantized already, as {own}; it is compared as it is by the scheme 'saved'"
        )


def bits_of(layers: list[LayerRecord]) -> float:
    """Bits a weight of all layers with a weight matrix, the head among them and embeddings not."""
    return 8 * sum(layer.bytes_after for layer in layers) / max(sum(layer.parameters for layer in layers), 1)
