"""Transcriptions as subtitles."""

from __future__ import annotations

from collections.abc import Iterator

from torch_armllm.speech.transcription import Segment, Transcription


def srt(found: Transcription) -> str:
    """Returns a transcription in the format of SubRip."""
    parts = [
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{text}\n"
        for number, (each, text) in enumerate(_lines(found), 1)
    ]
    return "\n".join(parts)


def vtt(found: Transcription) -> str:
    """Returns a transcription in the format WebVTT."""
    parts = [
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n"
        f"{text.replace('&', '&amp;').replace('<', '&lt;')}\n"
        for each, text in _lines(found)
    ]
    return "\n".join(["WEBVTT\n", *parts])


def _lines(found: Transcription) -> Iterator[tuple[Segment, str]]:
    """Yields the segments in which something is said, with their texts as one line that is no time."""
    for each in found.segments:
        if text := " ".join(each.text.split()).replace("-->", "->"):
            yield each, text


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
