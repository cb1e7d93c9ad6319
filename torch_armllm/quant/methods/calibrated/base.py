"""The base class of methods that calibrate, one decoder layer after the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.base import Method
from torch_armllm.quant.methods.calibrated.channel_scaling import AppliedScaling
from torch_armllm.quant.methods.calibrated.layerwise import Stages, batch_size_for
from torch_armllm.quant.methods.calibrated.stage_scaling import StageScaling

logger = logging.getLogger(__name__)


class CalibratedMethod(Method):
    """A method that calibrates a model's stages in order.

    Attributes:
        stages: the parts of the model that are run and calibrated one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tokens: Tensor,
        on_meta: bool = False,
        batch: int | None = None,
        rotate: bool = True,
    ) -> None:
        """Prepares to run the model.

        Args:
            model: the model that is quantized.
            layers: the layers to quantize.
            tokens: token ids (sequences, length).
            on_meta: decoder layers are on the meta device, and get their weights one after the other.
            batch: sequences that run at a time; None: as many as have about 2048 tokens.
            rotate: see `Method`.
        """
        super().__init__(rotate)
        self.stages = Stages(model, tokens, batch or batch_size_for(tokens), on_meta)
        if self.stages.whole is not None:
            logger.warning(
                "%s cannot be run layer by layer (%s): it runs as a whole",
                type(model).__name__,
                self.stages.whole,
            )
        self._stage_of = self.stages.stage_indices(layers)
        self._layers = list(layers)
        self._scaling = StageScaling(model, self.stages, layers, self._stage_of)
        self._stage = self._advanced = -1

    def order(self, layers: Sequence[Layer]) -> Sequence[Layer]:  # noqa: D102
        last = len(self.stages.modules)
        return sorted(layers, key=lambda x: self._stage_of.get(x.name, last))

    @property
    def scaled(self) -> Sequence[AppliedScaling]:  # noqa: D102
        return self._scaling.scaled

    def abandon(self) -> None:  # noqa: D102
        self._scaling.undo()

    def finish(self, stage: int) -> None:
        """Runs a quantized stage, for the inputs of the next one; its weights are not needed again."""
        raise NotImplementedError

    def resume(self, stage: int) -> None:
        """Continues after a stage that an earlier run finished; call it after `Stages.restore`."""
        self._stage = self._advanced = stage
