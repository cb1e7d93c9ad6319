"""Loading of model variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.bundled_model import with_own_integers
from torch_armllm.checkpoint.load import load_model
from torch_armllm.evaluation.off_grid import move_off_grid
from torch_armllm.evaluation.variant import Variant
from torch_armllm.llm.calibration_text import calibration_tokens
from torch_armllm.patching.patch import patch
from torch_armllm.patching.state import is_patched
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.inspection import describe, is_packed
from torch_armllm.quant.report import LayerRecord
from torch_armllm.system.dtypes import float_dtype


def load_variant(
    source: str,
    variant: Variant,
    dtype: str = "auto",
    calibration: Path | None = None,
    off_grid: bool = False,
    progress: bool = False,
) -> tuple[Any, list[LayerRecord]]:
    """Loads a variant of a model.

    Args:
        source: see `torch_armllm.checkpoint.load.load_model`; the variant ``saved`` of ``smollm2`` has the
            integers of its 4-bit file; one of a folder is loaded from there.
        variant: the dtype, scheme and method.
        dtype: dtype of the loaded weights, unless the variant names one.
        calibration: a text file for calibrating methods; None: the model generates the tokens.
        off_grid: see `move_off_grid`.
        progress: shows bars.

    Returns:
        The model, and the records of its layers.

    Raises:
        ValueError: the checkpoint is already quantized in another scheme than the variant's; or the
            calibration text is too short.
    """
    requested_dtype = variant.dtype or dtype
    chosen = float_dtype(requested_dtype)
    if variant.folder is not None:
        source = str(variant.folder)
    elif variant.saved:
        source = with_own_integers(source)
    cache = variant.kv_cache_dtype if variant.saved else None
    model = load_model(source, chosen, progress=progress, dequantize=not variant.saved, kv_cache_dtype=cache)
    if is_packed(model):
        _check_packed(model, variant)
    elif off_grid:
        move_off_grid(model)
    if is_patched(model) or not variant.patched:
        return model, describe(model, "nothing is quantized")
    tokens = calibration_tokens(source, calibration) if variant.calibrated else None
    report = patch(
        model, variant.recipe, progress=progress, calibration=tokens, kv_cache_dtype=variant.kv_cache_dtype
    )
    return model, report.layers


def _check_packed(model: Any, variant: Variant) -> None:
    config = getattr(model.config, "quantization_config", None)
    scheme = config.recipe.scheme if isinstance(config, ArmInt4Config) else None
    if not variant.patched or (variant.quantization is not None and variant.quantization != scheme):
        raise ValueError(
            f"the checkpoint is quantized already, as {scheme}; it is compared as it is by the scheme 'saved'"
        )


def bits_of(layers: list[LayerRecord]) -> float:
    """Returns the bits per weight of all layers with a weight matrix: the head included, embeddings not."""
    return 8 * sum(layer.bytes_after for layer in layers) / max(sum(layer.parameters for layer in layers), 1)
