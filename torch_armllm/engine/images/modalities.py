"""Modalities of prompts beside text: what a processor calls them, and what an item of one is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_armllm.engine.media.audio_clips import checked_clip
from torch_armllm.engine.media.image_files import check_size
from torch_armllm.engine.media.taken_media import PLURALS, TakenMedia
from torch_armllm.engine.media.video import Video, as_video


@dataclass(frozen=True)
class Modality:
    """A modality of prompts beside text.

    Attributes:
        name: in ``multi_modal_data``, as vLLM calls it.
        arguments: names that processors have for its items.
        parts: attributes of a processor that reads its items.
        tokens: attributes of a processor, or of its tokenizer, with the placeholder of an item in a text.
        checked: returns an item as processors take it, and raises ValueError for others.
    """

    name: str
    arguments: tuple[str, ...]
    parts: tuple[str, ...]
    tokens: tuple[str, ...]
    checked: Callable[[Any, TakenMedia], Any]

    @property
    def noun(self) -> str:
        """Several items, for errors."""
        return PLURALS[self.name]

    def argument_of(self, processor: Any) -> str | None:
        """Returns the argument of a processor's call that takes the items; None: it takes none."""
        from transformers import ProcessorMixin  # deferred: the import takes seconds

        call = type(processor).__call__
        named = inspect.signature(call).parameters
        found = next((name for name in self.arguments if name in named), None)
        if call is ProcessorMixin.__call__ and not any(hasattr(processor, part) for part in self.parts):
            return None
        return found


def items_of(data: Mapping[str, Any], taken: TakenMedia) -> dict[str, list[Any]]:
    """Returns the items of each modality of a prompt, as processors take them.

    Args:
        data: ``multi_modal_data`` of a prompt.
        taken: what the model takes.

    Raises:
        ValueError: an item is none, or there are too many, or the model takes none.
    """
    items = {
        name: [] if value is None else list(value) if modality_is_list(name, value) else [value]
        for name, value in data.items()
    }
    taken.check({name: len(each) for name, each in items.items()})
    return {
        name: [MODALITIES[name].checked(item, taken) for item in each] for name, each in items.items() if each
    }


def modality_is_list(name: str, value: Any) -> bool:
    """True if a value of ``multi_modal_data`` is a list of items, and not one item."""
    if name == "image":
        return isinstance(value, (list, tuple))
    if not isinstance(value, list):
        return False
    return name != "video" or not value or not _is_frame(value[0])


def _is_frame(value: Any) -> bool:
    return hasattr(value, "convert") or getattr(value, "ndim", 0) == 3


def sampling_rate(processor: Any) -> int:
    """Returns the samples of a second that a processor takes."""
    for name in ("feature_extractor", "audio_processor"):
        rate = getattr(getattr(processor, name, None), "sampling_rate", None)
        if isinstance(rate, int):
            return rate
    return 16_000


def _image(value: Any, _: TakenMedia) -> Any:
    if not hasattr(value, "convert") or not hasattr(value, "size"):
        raise ValueError(f"an image is a {type(value).__name__}: give a PIL.Image.Image")
    check_size(value)
    return value.convert("RGB")


def _audio(value: Any, taken: TakenMedia) -> Any:
    return checked_clip(value, taken)


def _video(value: Any, _: TakenMedia) -> Video:
    return as_video(value)


_IMAGE = Modality(
    name="image",
    arguments=("images",),
    parts=("image_processor",),
    tokens=("image_token", "boi_token", "fake_image_token"),
    checked=_image,
)
_VIDEO = Modality(
    name="video",
    arguments=("videos",),
    parts=("video_processor",),
    tokens=("video_token",),
    checked=_video,
)
_AUDIO = Modality(
    name="audio",
    arguments=("audio", "audios", "raw_speech", "speech"),
    parts=("feature_extractor", "audio_processor"),
    tokens=("audio_token", "boa_token", "speech_token"),
    checked=_audio,
)
MODALITIES: Mapping[str, Modality] = {each.name: each for each in (_IMAGE, _VIDEO, _AUDIO)}
"""The modalities, by their names."""


def names_of(modalities: Sequence[str]) -> str:
    """Returns what modalities are called in errors."""
    return " and ".join(MODALITIES[name].noun for name in modalities)
