"""Rounding methods: the interface of all methods, and the two that need no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torch_armllm.quant.schemes.base import Peak, Rounding, Scheme, Search

if TYPE_CHECKING:  # `quant.layers` imports transformers, which takes seconds
    from torch_armllm.quant.layers import Layer
    from torch_armllm.quant.methods.calibrated.channel_scaling import AppliedScaling
    from torch_armllm.quant.modules.experts import QuantExperts
    from torch_armllm.quant.modules.linear import QuantLinear
    from torch_armllm.quant.spill_file import SpillFile

UNCALIBRATED = ("mse", "rtn")
CALIBRATED = ("gptq", "awq")
METHODS = (*UNCALIBRATED, *CALIBRATED)


class Method:
    """Chooses the integers of all layers of one model.

    `Quantization` packs the layers in the method's `order`.  For each it requests a `rounding`, packs
    the layer and calls `on_packed`.  When all layers are packed and nothing can fail any more, the caller
    calls `commit`; until then the model must stay as it is, or be restored by `abandon`.
    """

    name: str

    def __init__(self, rotate: bool = True) -> None:
        """``rotate``: multiply inputs of linear layers by a Hadamard matrix, where `rotates` says so."""
        self._rotate = rotate

    def order(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Returns the layers in the order in which they must be quantized."""
        return layers

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:
        """Returns the rounding of a matrix.

        Args:
            layer: the layer of the matrix.
            scheme: the scheme of the layer.
            weight: name of the parameter: ``weight``, or one of `ExpertLayout.weights`.
            expert: index of the expert; its gate and up projection share a rounding, as they read the same
                inputs.
        """
        raise NotImplementedError

    def rotates(self, layer: Layer, scheme: Scheme) -> bool:
        """True if the rounding of a linear layer is for its rotated weight: see `QuantLinear.rotated`.

        INT8 weights are fine enough for any method; INT4 ones need calibration.
        """
        kinds = ("linear", "head", "experts")
        return self._rotate and scheme.name == "int8" and layer.kind in kinds and layer.has_whole_groups()

    def sees_inputs(self, layer: Layer, scheme: Scheme, weight: str) -> bool:
        """True if a matrix multiplies the inputs of its layer themselves, whose energies can be measured.

        The input of ``down_proj`` is internal to the experts' module; rotated inputs are others.
        """
        return weight != "down_proj" and not self.rotates(layer, scheme)

    def on_packed(self, layer: Layer, module: QuantLinear | QuantExperts, spill: SpillFile) -> None:
        """Called when a layer is packed; the buffers of ``module`` are in ``spill``."""

    @property
    def scaled(self) -> Sequence[AppliedScaling]:
        """Channel scalings that the model's float weights have; `restore` takes them back."""
        return ()

    def commit(self) -> None:
        """Finishes the run, after all layers are packed; it must not fail."""

    def abandon(self) -> None:
        """Restores the model after an error."""


class Rtn(Method):
    """Round to nearest: the baseline of the other methods."""

    name = "rtn"

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        return Peak()


class Mse(Method):
    """Searches the scales with the least squared error, weighted by input channel if importance is known.

    With input statistics of a model that runs layer by layer, `Smoothed` takes its place.
    """

    name = "mse"

    def __init__(self, energies: Mapping[str, Tensor] | None = None, rotate: bool = True) -> None:
        """Prepares.

        Args:
            energies: mean squares of inputs, float32 ``(K,)``, by layer name: see `input_energies`.
            rotate: see `Method`.
        """
        super().__init__(rotate)
        self._energies = energies or {}

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        return Search(self._energies.get(layer.name) if self.sees_inputs(layer, scheme, weight) else None)


def check_method(name: str) -> None:
    """Raises ValueError if there is no such method."""
    if name not in METHODS:
        raise ValueError(f"unknown quantization method {name!r}; there are {', '.join(METHODS)}")
