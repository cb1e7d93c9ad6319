"""Transcriptions as subtitles."""

from __future__ import annotations

from torch_armllm.speech.subtitles import srt, vtt
from torch_armllm.speech.transcription import Segment, Transcription

FOUND = Transcription(
    "",
    "en",
    3700.0,
    [
        Segment(0.0, 1.9996, " Fish\n\n& chips -->  <now>", []),
        Segment(2.0, 2.5, "  ", []),
        Segment(59.94, 3661.005, "è", []),
    ],
)


def test_srt() -> None:
    assert srt(FOUND) == (
        "1\n00:00:00,000 --> 00:00:02,000\nFish & chips -> <now>\n\n2\n00:00:59,940 --> 01:01:01,005\nè\n"
    )


def test_vtt() -> None:
    assert vtt(FOUND) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nFish &amp; chips -> &lt;now>\n\n"
        "00:00:59.940 --> 01:01:01.005\nè\n"
    )


def test_nothing_said() -> None:
    silent = Transcription("", None, 1.0, [])
    assert (srt(silent), vtt(silent)) == ("", "WEBVTT\n")
