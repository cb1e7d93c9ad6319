"""Scaling of a model's channels, one decoder layer after the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.quant.layers import Layer, is_linear
from torch_armllm.quant.methods.calibrated.channel_scaling import (
    AppliedScaling,
    ChannelScaling,
    undo_scalings,
)
from torch_armllm.quant.methods.calibrated.channels import Channels
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs, record_inputs
from torch_armllm.quant.methods.calibrated.layerwise import Stages
from torch_armllm.quant.methods.calibrated.scaling_search import find_scalings

logger = logging.getLogger(__name__)

ChoosePowers = Callable[[ChannelScaling, FloatInputs], Tensor | None]
"""Returns powers of two (written,), float32, or None, for a scaling and the inputs of its readers.

For channels inside experts these are the inputs of the experts.
"""


class StageScaling:
    """Scales the channels of a model's stages; the float model computes the same bits as before.

    Attributes:
        scaled: the scalings that were applied, in order.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, layers: Sequence[Layer], stage_of: Mapping[str, int]
    ) -> None:
        """Prepares to scale.

        Args:
            model: the float model.
            stages: runs it.
            layers: the layers to quantize.
            stage_of: the stage of each layer by name; layers outside of all stages have none.
        """
        self.scaled: list[AppliedScaling] = []
        self._model, self._stages = model, stages
        self._layers, self._stage_of = layers, stage_of
        self._last = max(stage_of.values(), default=-1)
        self._refused: Counter[str] = Counter()

    def run(self, stage: int, choose: ChoosePowers) -> dict[str, FloatInputs]:
        """Runs a stage in the float model and scales its channels.

        Returns:
            The inputs of its layers, as the scaled layers read them, by layer name.
        """
        inside = [x for x in self._layers if self._stage_of.get(x.name) == stage]
        inputs = record_inputs(inside, lambda: self._stages.run_float(stage))
        of_module = {
            id(x.module): inputs[x.name] for x in inside if x.name in inputs and inputs[x.name].inputs
        }
        module = self._stages.modules[stage]
        readers = readers_in(module, {id(x.module): x.layout for x in inside if x.layout is not None})
        scalings, refused = find_scalings(module, readers, lambda: self._stages.probe(stage))
        expected = self._stages.sample(stage)
        self._refused.update(refused)
        shared = self._parameters_elsewhere(stage)
        applied: list[tuple[AppliedScaling, list[FloatInputs]]] = []
        for scaling in scalings:
            read = {id(x): x for r in scaling.readers if (x := of_module.get(id(r.module))) is not None}
            if not read or any(id(p) in shared for m in scaling.modules for p in m.parameters()):
                continue
            entries = list(read.values())
            powers = choose(scaling, entries[0])
            if powers is None:
                continue
            powers = scaling.limited(powers)
            scaled = [] if scaling.writer.inside else entries
            applied.append((scaling.apply(powers), scaled))
            for entry in scaled:
                entry.multiply(scaling.spread(1 / powers))
        while applied and not torch.equal(self._stages.sample(stage), expected):
            one, scaled = applied.pop()  # float16 activations may lose bits where weights do not
            one.undo()
            for entry in scaled:
                entry.multiply(one.scaling.spread(one.powers))
        self.scaled += [one for one, _ in applied]
        if stage == self._last and self._refused:
            names = ", ".join(f"{name} ({_stages(count)})" for name, count in self._refused.items())
            logger.info("channels that are not scaled: %s", names)
        return inputs

    def undo(self) -> None:
        """Restores the float model."""
        undo_scalings(self.scaled)
        self.forget()

    def forget(self) -> None:
        """Keeps the scalings for good."""
        self.scaled = []

    def _parameters_elsewhere(self, stage: int) -> set[int]:
        """Returns the ids of the parameters that other stages, and modules outside of a stage, have."""
        inside = {id(module) for module in self._stages.modules[stage].modules()}
        elsewhere = [module for module in self._model.modules() if id(module) not in inside]
        for index, other in enumerate(self._stages.modules):
            if index != stage:
                elsewhere += other.modules()
        return {id(p) for module in elsewhere for p in module._parameters.values() if p is not None}


def readers_in(stage: nn.Module, layouts: Mapping[int, ExpertLayout]) -> list[Channels]:
    """Returns the linear layers, routers and experts of a stage.

    Args:
        stage: the decoder layer.
        layouts: layouts of experts that are known, by the module's id.
    """
    readers = []
    for module in stage.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            continue
        if is_experts(module):
            layout = layouts.get(id(module)) or read_layout(module)
            if not isinstance(layout, str):
                readers.append(Channels(module, layout))
        elif is_linear(module) or _is_router(module):
            readers.append(Channels(module))
    return readers


def _is_router(module: nn.Module) -> bool:
    """True if a module may be a router: it has a weight (N, K); that it reads channels is seen as it runs."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"
