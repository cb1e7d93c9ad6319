"""What methods that calibrate share: they go through a model's decoder layers in order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.base import Method
from torch_armllm.quant.methods.calibrated.layerwise import Stages, batch_size_for


class CalibratedMethod(Method):
    """A method that runs one stage after the other.

    Attributes:
        stages: what it runs.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], tokens: Tensor, on_meta: bool = False
    ) -> None:
        """Takes token ids (sequences, length); layers of a model on the meta device (``on_meta``) have weights in turn."""
        self.stages = Stages(model, tokens, batch_size_for(tokens), on_meta)
        self._stage_of = self.stages.stage_indices(layers)
        self._layers = list(layers)
        self._now = self._left = -1

    def order(self, layers: Sequence[Layer]) -> Sequence[Layer]:  # noqa: D102
        last = len(self.stages.modules)
        return sorted(layers, key=lambda x: self._stage_of.get(x.name, last))

    def finish(self, stage: int) -> None:
        """Runs a stage whose layers are done, as they are to be: its weights are not needed again."""
        raise NotImplementedError

    def resume(self, stage: int) -> None:
        """Begins behind a stage that another run finished, the stages being restored."""
        self._now = self._left = stage
