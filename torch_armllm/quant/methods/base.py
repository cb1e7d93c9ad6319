"""How integers are chosen for a model's weights: what all methods share, and the two that need no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.schemes.base import Rounding, Scheme
from torch_armllm.quant.schemes.search import Peak, Search
from torch_armllm.quant.spill_file import SpillFile

UNCALIBRATED = ("mse", "rtn")
CALIBRATED = ("gptq", "awq")
METHODS = (*UNCALIBRATED, *CALIBRATED)


class Method:
    """Chooses the integers of all layers of a model; made for one model and one recipe.

    The quantizer goes through the layers in the method's `order`.  For each it asks for a `rounding`, makes
    the packed module and hands it to `on_packed`; when all are made and nothing can fail any more, it calls
    `commit`.  Until then the model must stay as it is, or be put back by `abandon`.
    """

    name: str

    def order(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """The layers in the order in which they are to be quantized."""
        return layers

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:
        """How a matrix is rounded.

        Args:
            layer: whose weight it is.
            scheme: what it becomes.
            weight: name of the parameter: ``weight``, or of experts `ExpertLayout.weights`.
            expert: whose matrix of the parameter; gate and up of an expert are asked for one after the other
                by the same name, as they read the same inputs.
        """
        raise NotImplementedError

    def on_packed(self, layer: Layer, made: QuantLinear | QuantExperts, spill: SpillFile) -> None:
        """Learns what became of a layer; the buffers of ``made`` are in the ``spill``."""

    def commit(self) -> None:
        """Makes what the method changes beside the layers; it must not fail."""

    def abandon(self) -> None:
        """Undoes what the method did to the model, after an error."""


class Rtn(Method):
    """Round to nearest: what other methods are compared with."""

    name = "rtn"

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        return Peak()


class Mse(Method):
    """Searches scales by squared error, and regards what each input channel carries where that is known."""

    name = "mse"

    def __init__(self, energies: Mapping[str, Tensor] | None = None) -> None:
        """Mean squares of inputs, float32 ``(K,)``, by name of the layer: see `input_energies`."""
        self._energies = energies or {}

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        # what goes into `down_proj` is inside of the experts' module, and was not measured
        return Search(None if weight == "down_proj" else self._energies.get(layer.name))


def check_method(name: str) -> None:
    """Raises ValueError if there is no such method."""
    if name not in METHODS:
        raise ValueError(f"unknown quantization method {name!r}; there are {', '.join(METHODS)}")
