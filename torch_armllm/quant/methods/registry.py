"""Creation of the method that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.base import CALIBRATED, Method, Mse, Rtn
from torch_armllm.quant.methods.calibrated.awq import Awq
from torch_armllm.quant.methods.calibrated.gptq import Gptq
from torch_armllm.quant.methods.importance import input_energies


def make_method(
    name: str,
    model: nn.Module,
    layers: Sequence[Layer],
    importance: bool = False,
    calibration: Tensor | None = None,
    resume: Path | None = None,
    on_meta: bool = False,
) -> Method:
    """Creates a method for the layers of a model.

    Args:
        name: one of `METHODS`.
        model: the model that is quantized.
        layers: the layers to quantize.
        importance: ``mse`` weights errors by the energy of each input channel on random tokens.
        calibration: token ids ``(sequences, length)`` for calibrating methods.
        resume: a folder in which ``gptq`` stores finished layers, for a run after an interruption.
        on_meta: decoder layers are on the meta device, and get their weights one after the other.

    Raises:
        ValueError: the method needs calibration tokens and there are none, or cannot use them.
    """
    if name in CALIBRATED:
        if calibration is None:
            raise ValueError(f"method {name!r} needs calibration texts: pass their token ids as calibration=")
        if name == "gptq":
            return Gptq(model, layers, calibration, resume, on_meta)
        return Awq(model, layers, calibration, on_meta)
    if calibration is not None:
        raise ValueError(f"method {name!r} does not calibrate; methods that do are {', '.join(CALIBRATED)}")
    if name == "rtn":
        return Rtn()
    return Mse(input_energies(model, layers) if importance else None)
