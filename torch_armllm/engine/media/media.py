"""Images, sound and videos of chat messages, opened and taken out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch_armllm.engine.media.audio_clips import audio_of_base64, audio_of_url, given_audio
from torch_armllm.engine.media.image_files import given_image, image_of_url
from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.taken_media import TakenMedia
from torch_armllm.engine.media.video_clips import given_video, video_of_url

MOST_BYTES_TOGETHER = 1 << 28
"""Bytes that the media of a request to a server take when they are decoded, and those that its requests hold
at a time."""


class OpenedMedium(Protocol):
    """A file of a message of which no more than the header was read, or what a caller gave."""

    @property
    def nbytes(self) -> int:
        """Bytes that decoding takes; 0 if it is decoded."""
        ...

    def decoded(self) -> Any:
        """Returns the item of ``multi_modal_data``.

        Raises:
            ValueError: it is damaged, or other than its header says.
        """
        ...


class PartKind(NamedTuple):
    """A type of parts that hold media.

    Attributes:
        modality: one of `MODALITIES`.
        open: reads a part no further than the header.
    """

    modality: str
    open: Callable[[Mapping[str, Any], MediaAccess, TakenMedia], OpenedMedium]


PART_KINDS: Mapping[str, PartKind] = {
    "image_url": PartKind("image", image_of_url),
    "image_pil": PartKind("image", given_image),
    "input_audio": PartKind("audio", audio_of_base64),
    "audio_url": PartKind("audio", audio_of_url),
    "audio": PartKind("audio", given_audio),
    "video_url": PartKind("video", video_of_url),
    "video": PartKind("video", given_video),
}
"""Types of parts that hold media; ``image_pil``, ``audio`` and ``video`` are those of offline calls."""

Opened = dict[str, list[OpenedMedium]]


def with_media(
    messages: Sequence[Mapping[str, Any]], access: MediaAccess, taken: TakenMedia
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Takes images, sound and videos out of messages.

    Args:
        messages: a conversation, whose parts are of `PART_KINDS` or others, which are left alone.
        access: what their URLs may name.
        taken: what the model takes; more or other media are refused before anything is read.

    Returns:
        Messages with ``{"type": "image"}``, ``{"type": "audio"}`` or ``{"type": "video"}`` instead, as chat
        templates read them; and ``multi_modal_data``: the media by modality, in the order of their parts.

    Raises:
        ValueError: something cannot be read or may not be, there are too many, or the model takes none.
    """
    converted, opened = open_media(messages, access, taken)
    return converted, {modality: [each.decoded() for each in media] for modality, media in opened.items()}


def open_media(
    messages: Sequence[Mapping[str, Any]],
    access: MediaAccess,
    taken: TakenMedia,
    most_bytes: int | None = None,
) -> tuple[list[dict[str, Any]], Opened]:
    """Takes media out of messages, and reads no more than their headers; see `with_media`.

    Args:
        messages: see there.
        access: see there.
        taken: see there.
        most_bytes: that all may take when they are decoded; None: any number.

    Returns:
        The messages, and the media by modality.

    Raises:
        ValueError: see there; or the media take more bytes together.
    """
    taken.check(Counter(kind.modality for message in messages for kind in _kinds(message)))
    opened: Opened = {}
    nbytes = 0
    converted = []
    for message in messages:
        if _kinds(message):
            parts = []
            for part in _parts(message):
                if (kind := _kind(part)) is not None:
                    medium = kind.open(part, access, taken)
                    nbytes += medium.nbytes
                    if most_bytes is not None and nbytes > most_bytes:
                        raise ValueError(
                            f"images, sound and videos of a request may take at most {most_bytes} bytes "
                            "together when they are decoded: send smaller ones, or fewer"
                        )
                    opened.setdefault(kind.modality, []).append(medium)
                    part = {"type": kind.modality}
                parts.append(part)
            message = {**message, "content": parts}
        converted.append(dict(message))
    return converted, opened


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a part of a message is an image, sound or a video."""
    return any(_kinds(message) for message in messages)


def _kinds(message: Mapping[str, Any]) -> list[PartKind]:
    return [kind for part in _parts(message) if (kind := _kind(part)) is not None]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _kind(part: Any) -> PartKind | None:
    name = part.get("type") if isinstance(part, Mapping) else None
    return PART_KINDS.get(name) if isinstance(name, str) else None
