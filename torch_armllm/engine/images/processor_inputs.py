"""Inputs of a model by its own processor, for a text with items of other modalities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_armllm.engine.images.modalities import MODALITIES, sampling_rate
from torch_armllm.engine.media.video import video_arguments

_FOR_OTHERS = ("labels", "video_metadata")
"""Results of processors that are for training, or for the processor itself."""


def inputs_of(
    processor: Any,
    text: str,
    items: Mapping[str, Sequence[Any]],
    asked: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the inputs of a model, a batch of one.

    Args:
        processor: the model's own.
        text: with placeholders.
        items: of each modality, as `items_of` returns them; none is empty.
        asked: arguments for what the model takes, which not every processor knows.
        options: further arguments of the processor.

    Raises:
        Exception: the processor refuses them, in any way.
    """
    failed: Exception | None = None
    ways = list(_ways(processor, items))
    for named in [*({**way, **asked} for way in ways), *(ways if asked else ())]:
        try:
            given = processor(text=[text], return_tensors="pt", **{**named, **options})
        except Exception as error:  # noqa: BLE001 - the processors of transformers raise errors of any kind
            failed = failed or error
            continue
        return {name: value for name, value in given.items() if name not in _FOR_OTHERS}
    assert failed is not None
    raise failed


def _ways(processor: Any, items: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields arguments of a processor, the most common first."""
    from transformers import ProcessorMixin  # deferred: the import takes seconds

    flat = (False, True) if "image" in items else (False,)  # most take lists of the images of each text
    videos = items.get("video", ())
    for is_flat in flat:
        named: dict[str, Any] = {_argument(processor, name): list(values) for name, values in items.items()}
        if "audio" in items and type(processor).__call__ is ProcessorMixin.__call__:
            named["sampling_rate"] = sampling_rate(processor)  # extractors warn where nobody names it
        if "image" in items and not is_flat:
            named[_argument(processor, "image")] = [list(items["image"])]
        if not videos:
            yield named
            continue
        frames = {_argument(processor, "video"): [video.frames for video in videos]}
        if hasattr(processor, "video_processor"):  # otherwise they are images to it, without times
            yield {**named, **video_arguments(videos)}
            yield {**named, **video_arguments(videos), "return_metadata": True}
        yield {**named, **frames}


def _argument(processor: Any, modality: str) -> str:
    argument = MODALITIES[modality].argument_of(processor)
    assert argument is not None, "the modality was tried"
    return argument
