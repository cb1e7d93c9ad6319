"""Inputs of a model by its own processor, for a text with items of other modalities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_armllm.engine.images.modalities import MODALITIES
from torch_armllm.engine.media.video import video_arguments

_FOR_TRAINING = ("labels",)


def inputs_of(
    processor: Any, text: str, items: Mapping[str, Sequence[Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the inputs of a model, a batch of one.

    Args:
        processor: the model's own.
        text: with placeholders.
        items: of each modality, as `items_of` returns them; none is empty.
        options: further arguments of the processor.
    """
    failed: Exception | None = None
    named: dict[str, Any] = {}
    for nested in (True, False):  # most take lists of the images of each text, and some know a flat one only
        named = {}
        for name, values in items.items():
            named |= dict(_arguments(processor, name, values, nested))
        try:
            given = processor(text=[text], return_tensors="pt", **{**named, **options})
        except Exception as error:  # noqa: BLE001 - the processors of transformers raise errors of any kind
            failed = failed or error
            if "image" in items:
                continue
            break
        return {name: value for name, value in given.items() if name not in _FOR_TRAINING}
    assert failed is not None
    raise failed


def _arguments(processor: Any, name: str, values: Sequence[Any], nested: bool) -> Iterator[tuple[str, Any]]:
    argument = MODALITIES[name].argument_of(processor)
    assert argument is not None, "the modality was tried"
    if name == "image":
        yield argument, [list(values)] if nested else list(values)
    elif name == "video":
        sampled = hasattr(processor, "video_processor")  # otherwise they are images to it, without times
        yield from video_arguments(values).items() if sampled else [(argument, [v.frames for v in values])]
    else:
        yield argument, list(values)
