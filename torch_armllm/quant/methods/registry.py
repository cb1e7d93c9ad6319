"""Creation of the method that a recipe names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.base import CALIBRATED, Method, Mse, Rtn
from torch_armllm.quant.methods.calibrated.awq import Awq
from torch_armllm.quant.methods.calibrated.gptq import Gptq
from torch_armllm.quant.methods.calibrated.smoothed import Smoothed
from torch_armllm.quant.methods.importance import input_energies, random_tokens
from torch_armllm.quant.recipe import Recipe

logger = logging.getLogger(__name__)


def make_method(
    recipe: Recipe,
    model: nn.Module,
    layers: Sequence[Layer],
    calibration: Tensor | None = None,
    *,
    statistics: bool = False,
    resume: Path | None = None,
    on_meta: bool = False,
) -> Method:
    """Creates a method for the layers of a model.

    Args:
        recipe: names the method, and says whether it rotates.
        model: the model that is quantized.
        layers: the layers to quantize.
        calibration: token ids ``(sequences, length)`` for calibrating methods.
        statistics: ``mse`` measures the inputs of layers on random tokens, scales channels and weights
            errors by what it sees; ``gptq`` scales channels by the inputs of its calibration.
        resume: a folder in which ``gptq`` stores finished layers, for a run after an interruption.
        on_meta: decoder layers are on the meta device, and get their weights one after the other.

    Raises:
        ValueError: the method needs calibration tokens and there are none, or cannot use them.
    """
    name, rotate = recipe.method, recipe.rotate
    if name in CALIBRATED:
        if calibration is None:
            raise ValueError(f"method {name!r} needs calibration texts: pass their token ids as calibration=")
        if name == "gptq":
            return Gptq(model, layers, calibration, resume, on_meta, statistics, rotate)
        return Awq(model, layers, calibration, on_meta, rotate)
    if calibration is not None:
        raise ValueError(f"method {name!r} does not calibrate; methods that do are {', '.join(CALIBRATED)}")
    if name == "rtn":
        return Rtn(rotate)
    if not statistics or not isinstance(model, PreTrainedModel):
        return Mse(rotate=rotate)
    if on_meta:
        return Smoothed(model, layers, random_tokens(model), on_meta, rotate)
    smoothed = _smoothed(model, layers, rotate)
    return Mse(input_energies(model, layers), rotate) if smoothed is None else smoothed


def _smoothed(model: PreTrainedModel, layers: Sequence[Layer], rotate: bool) -> Smoothed | None:
    """Returns the method that scales channels; None if the model does not run layer by layer, or at all."""
    try:
        method = Smoothed(model, layers, random_tokens(model), rotate=rotate)
    except Exception as error:  # noqa: BLE001 - a model may need more than tokens, and fail in any way
        logger.info("channels are not scaled: %s", error)
        return None
    return method if method.stages.streamed else None
