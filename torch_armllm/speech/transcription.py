"""Results of a `Transcriber`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A part of a transcription.

    Attributes:
        start, end: seconds from the beginning of the audio.
        text: what is said.
        token_ids: its tokens, without timestamps.
    """

    start: float
    end: float
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Transcription:
    """A transcribed or translated audio.

    Attributes:
        text: all that is said.
        language: code of the language, such as ``en``; None for models of one language.
        duration: seconds of the audio.
        segments: its parts, in order.
    """

    text: str
    language: str | None
    duration: float
    segments: list[Segment]
