"""The layers of a model's towers, its encoders of images, videos and sounds, as plans."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.engine.images.decoder_call import ReadingModel
from torch_armllm.patching.forwards.encoder_layers import plan_layers
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.forwards.layer_calls import LayerCalls
from torch_armllm.quant.inspection import is_packed

logger = logging.getLogger(__name__)
_LISTS = ("layers", "layer", "blocks")
"""Names of an encoder's list of layers."""


def plan_towers(reading: ReadingModel, config: Any) -> list[PatchedForward[LayerCalls]]:
    """Lets plans compute the layers of a model's towers; see `plan_tower`.

    Args:
        reading: the model.
        config: of the whole model.
    """
    forwards = (plan_tower(tower, config) for tower in towers_of(reading))
    return [forward for forward in forwards if forward is not None]


def towers_of(reading: ReadingModel) -> list[Any]:
    """Returns the models within a model that are no part of its language model, the outermost ones."""
    from transformers import PreTrainedModel  # deferred: the import takes seconds

    table = reading.module.get_input_embeddings()
    found: list[Any] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            holds_text = any(inner is table for inner in child.modules())
            if isinstance(child, PreTrainedModel) and not holds_text:
                found.append(child)
            elif child is not reading.decoder:
                search(child)

    search(reading.module)
    return found


def plan_tower(tower: Any, config: Any) -> PatchedForward[LayerCalls] | None:
    """Lets plans compute the layers of a tower; its other modules stay.

    Args:
        tower: of a model.
        config: the model's.

    Returns:
        The new ``forward`` of the tower; None: the layers need more than plans know, or have none.
    """
    layers = _layers_of(tower)
    if not layers:
        return None
    plans = []
    try:
        begin = 0
        for end in _ends(tower, config, len(layers)):
            plans.append(plan_layers(tower.config, layers[begin:end], is_packed(tower))[0])
            begin = end
    except CaptureError as error:
        logger.info("%s runs by its modules: %s", type(tower).__name__, error)
        return None
    # the reader of pictures compares with the modules, and drops a tower whose other states are read
    forward = PatchedForward(LayerCalls(tower, plans, all_means_kept=True))
    tower.forward = forward
    return forward


def _layers_of(tower: nn.Module) -> list[nn.Module]:
    lists = (getattr(module, name, None) for module in tower.modules() for name in _LISTS)
    return list(next((found for found in lists if isinstance(found, nn.ModuleList)), ()))


def _ends(tower: Any, config: Any, count: int) -> list[int]:
    """Returns the ends of those ranges of layers between which a model reads results or divides others.

    Args:
        tower: its layers within or without windows take turns, or features of pictures are of some.
        config: of the model, which may name the layers whose results it reads.
        count: number of layers.
    """
    chosen = getattr(config, "vision_feature_layer", None)
    chosen = [] if chosen is None else [chosen] if isinstance(chosen, int) else chosen
    ends = {count, *(number % (count + 1) for number in chosen)}
    ends |= {number + 1 for number in getattr(tower, "deepstack_visual_indexes", None) or ()}
    whole = set(getattr(tower, "fullatt_block_indexes", None) or ())
    ends |= {number for number in range(1, count) if (number in whole) != (number - 1 in whole)}
    return sorted(ends - {0})
