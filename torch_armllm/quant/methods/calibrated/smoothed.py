"""The method ``mse`` with input statistics: channels are scaled, then scales are searched."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.layerwise import NotByLayersError
from torch_armllm.quant.methods.calibrated.smoothing import energy_of, smoothing_powers
from torch_armllm.quant.schemes.base import Rounding, Scheme, Search

logger = logging.getLogger(__name__)


class Smoothed(CalibratedMethod):
    """Scales channels, and searches scales with errors weighted by what channels carry.

    See `smoothing_powers`.  Random tokens are enough for both.
    """

    name = "mse"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tokens: Tensor,
        on_meta: bool = False,
        rotate: bool = True,
    ) -> None:
        """Prepares to run the model."""
        super().__init__(model, layers, tokens, on_meta, batch=1, rotate=rotate)
        self._unstreamable = False
        self._energies: dict[str, Tensor] = {}

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._stage_of.get(layer.name, -1)
        while self._stage < stage:
            self._stage += 1
            self._energies = self._smooth(self._stage)
        return Search(self._energies.get(layer.name) if self.sees_inputs(layer, scheme, weight) else None)

    def _smooth(self, stage: int) -> dict[str, Tensor]:
        """Scales the channels of a stage, and returns the energies of its layers' inputs by name."""
        if self._unstreamable:
            return {}
        try:
            inputs = self._scaling.run(stage, smoothing_powers)
        except NotByLayersError as error:
            self._unstreamable = True
            logger.warning("%s: weights are rounded without input statistics", error)
            return {}
        return {name: energy_of(entry.inputs) for name, entry in inputs.items() if entry.inputs}

    def finish(self, stage: int) -> None:  # noqa: D102
        if self._stage < stage:
            self._stage = stage
            self._smooth(stage)
        self._scaling.forget()
