"""The layers of a vision tower as a plan."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.encoder_layers import EncoderLayers, EncoderLayersForward
from torch_armllm.quant.inspection import is_packed

logger = logging.getLogger(__name__)
_TAKEN = {"inputs_embeds", "attention_mask"}
"""Arguments of the encoders whose layers take hidden states and a mask alone."""


def plan_layers(tower: nn.Module) -> EncoderLayersForward | None:
    """Lets a plan compute the layers of a vision tower; its other modules stay.

    Returns:
        The new ``forward`` of its encoder; None: the layers need more than hidden states, or have no plan.
    """
    for module in tower.modules():
        encoder: Any = module
        has_layers = isinstance(getattr(encoder, "layers", None), nn.ModuleList)
        if has_layers and inspect.signature(encoder.forward).parameters.keys() >= _TAKEN:
            break
    else:
        return None
    layers = EncoderLayers(encoder)
    table: Any = layers.get_input_embeddings()
    try:
        built = build_plan(layers, is_packed(encoder), None)
    except CaptureError as error:
        logger.info("the vision tower runs by its modules: %s", error)
        return None
    if not built.looks_ahead:
        logger.info("the vision tower runs by its modules: its tokens do not attend to later ones")
        return None
    forward = EncoderLayersForward(
        encoder, built.plan, built.shape, int(table.num_embeddings), built.most_tokens, has_window=False
    )
    encoder.forward = forward
    return forward
