"""Sound of messages: files of all kinds, and headers and data that are none."""

from __future__ import annotations

import base64
import io
import struct
import warnings
from typing import Any

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("soxr", reason="needs the extra audio")

from torch_armllm.engine.media import audio_clips  # noqa: E402
from torch_armllm.engine.media.audio_clips import checked_clip  # noqa: E402
from torch_armllm.engine.media.media import open_media, with_media  # noqa: E402
from torch_armllm.engine.media.media_access import MediaAccess  # noqa: E402
from torch_armllm.engine.media.taken_media import TakenMedia  # noqa: E402

TAKEN = TakenMedia("Listener", {"audio": 3}, audio_rate=16_000)


def tone(seconds: float, rate: int = 16_000, channels: int = 1) -> np.ndarray[Any, Any]:
    """Returns a tone of 440 Hz, louder in the first channel."""
    wave = np.sin(np.arange(round(seconds * rate)) * (2 * np.pi * 440 / rate))
    return np.stack([wave * 0.5 / (1 + channel) for channel in range(channels)], 1).astype(np.float32)


def saved(samples: Any, kind: str = "WAV", subtype: str | None = None, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def part(data: bytes, named: str | None = None) -> dict[str, Any]:
    body = base64.b64encode(data).decode()
    if named is None:
        return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{body}"}}
    return {"type": "input_audio", "input_audio": {"data": body, "format": named}}


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is said ?"}]}]


def decoded(*parts: dict[str, Any], taken: TakenMedia = TAKEN) -> list[np.ndarray[Any, Any]]:
    converted, media = with_media(message(*parts), MediaAccess(), taken)
    assert [each["type"] for each in converted[0]["content"]] == ["audio"] * len(parts) + ["text"]
    return media["audio"]


@pytest.mark.parametrize(
    ("named", "kind", "subtype", "tolerance"),
    [
        ("wav", "WAV", "PCM_16", 1e-4),
        ("wav", "WAV", "PCM_24", 1e-6),
        ("wav", "WAV", "PCM_U8", 1e-2),
        ("wav", "WAV", "FLOAT", 0),
        ("wav", "RF64", "PCM_16", 1e-4),
        ("flac", "FLAC", "PCM_24", 1e-6),
        ("ogg", "OGG", "VORBIS", 0.1),
        ("mp3", "MP3", None, 0.1),
    ],
)
def test_formats_become_floats(named: str, kind: str, subtype: str | None, tolerance: float) -> None:
    own = tone(1.5)
    (found,) = decoded(part(saved(own, kind, subtype), named))
    assert found.dtype == np.float32 and found.shape == (24_000,)
    assert np.abs(found - own[:, 0])[2000:-2000].max() <= tolerance


def test_channels_are_mixed_and_rates_are_the_models() -> None:
    stereo = saved(tone(1.0, 44_100, 2), "WAV", "FLOAT", 44_100)
    (found,) = decoded(part(stereo))
    assert abs(len(found) - 16_000) <= 1
    assert np.abs(found[2000:14_000] - 0.75 * tone(1.0)[2000:14_000, 0]).max() < 1e-3
    (slow,) = decoded(part(stereo), taken=TakenMedia("Listener", {"audio": 1}, audio_rate=8_000))
    assert abs(len(slow) - 8_000) <= 1


def test_clips_keep_the_order_of_their_parts() -> None:
    found = decoded(
        part(saved(tone(0.5))), {"type": "audio", "audio": tone(1.0)[:, 0]}, part(saved(tone(2.0)))
    )
    assert [len(clip) for clip in found] == [8_000, 16_000, 32_000]


def flac_of(frames: int) -> bytes:
    """Returns a FLAC file of a second whose header says another number of samples."""
    data = bytearray(saved(tone(1.0), "FLAC"))
    data[21] = data[21] & 0xF0 | frames >> 32
    data[22:26] = struct.pack(">I", frames & 0xFFFFFFFF)
    return bytes(data)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def wav_of(samples: Any, claimed: int) -> bytes:
    """Returns a WAV file whose header says another number of bytes."""
    data = bytearray(saved(samples))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", claimed)
    return bytes(data)


NAN = np.array([0.0, np.nan, 0.1], np.float32)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (part(b"RIFF\0\0\0\0WAVE"), "no audio that can be decoded"),
        (part(b"%PDF-1.7"), "no audio that can be decoded"),
        (part(saved(tone(1.0), "FLAC"), "wav"), "says that its format is 'wav', and its data is FLAC"),
        (part(saved(tone(1.0)), "mp3"), "says that its format is 'mp3', and its data is WAV"),
        (part(saved(tone(1.0)), "m4a"), "format of an input_audio is 'm4a': send wav, flac, mp3"),
        (part(saved(tone(0.0))), "the audio has no samples"),
        (part(saved(NAN, "WAV", "FLOAT")), "not finite"),
        (part(saved(np.array([np.inf, 0.0]), "WAV", "FLOAT")), "not finite"),
        (part(saved(tone(1.0) * 32_768, "WAV", "FLOAT")), "up to 16384, and full scale is 1"),
        (part(saved(tone(0.1, 500), rate=500)), "500 samples a second"),
        (part(flac_of(1 << 31)), "no audio that can be decoded|seconds long"),
        (part(half(saved(tone(6.0), "MP3"))), "the audio ends after .* of the 6 seconds"),
        ({"type": "audio_url", "audio_url": {"url": ""}}, "audio_url part needs"),
        (
            {"type": "audio_url", "audio_url": {"url": "ftp://host/a.wav"}},
            "an audio file is not read from ftp",
        ),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "file URLs are not allowed"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,é"}}, "is no base64"),
        (
            {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a"}},
            "an audio file is not fetched from",
        ),
        ({"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}}, "no base64"),
        ({"type": "input_audio", "input_audio": {"data": "é", "format": "wav"}}, "no base64"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio part needs"),
        ({"type": "audio"}, "audio part needs"),
        ({"type": "audio", "audio": NAN}, "not finite"),
        (
            {"type": "audio", "audio": np.zeros((2, 9), np.float32)},
            r"float32 of shape \(2, 9\): give floats of",
        ),
        ({"type": "audio", "audio": np.zeros(9, np.int16)}, r"int16 of shape \(9,\): give floats"),
        ({"type": "audio", "audio": (tone(1.0)[:, 0], 0)}, "0 samples a second"),
        ({"type": "audio", "audio": (tone(1.0)[:, 0], "x")}, "rate of an audio clip is 'x'"),
        ({"type": "audio", "audio": "a.wav"}, "of shape"),
        ({"type": "audio", "audio": []}, "no samples"),
    ],
)
def test_what_is_no_sound_is_refused(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoded(bad)


def test_headers_that_claim_more_give_what_there_is() -> None:
    (found,) = decoded(part(wav_of(tone(1.0), 0xFFFFFFFE)))
    assert len(found) == 16_000
    clip = open_media(message(part(wav_of(tone(1.0), 0xFFFFFFFE))), MediaAccess(), TAKEN)[1]["audio"][0]
    assert clip.nbytes == 4 * 2 * 16_000  # a second more than there is


def test_an_hour_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_armllm.engine.media.audio_files.AudioFile.decoded", None)
    hour = saved(np.zeros(3600 * 1000, np.float32), "FLAC", "PCM_16", 1000)
    assert len(hour) < 100_000
    with pytest.raises(ValueError, match="max_audio_seconds allows 1800: cut it, or raise it"):
        decoded(part(hour))
    with pytest.raises(ValueError, match="3600 seconds long"):
        checked_clip(np.broadcast_to(np.float32(0), (3600 * 16_000,)), TAKEN)


def test_the_setting_bounds_files_and_arrays() -> None:
    short = TakenMedia("Listener", {"audio": 1}, audio_seconds=0.5)
    clip, said = tone(0.75)[:, 0], "the audio is 0.75 seconds long, and max_audio_seconds allows 0.5"
    with pytest.raises(ValueError, match=said):
        decoded(part(saved(clip)), taken=short)
    with pytest.raises(ValueError, match=said):
        checked_clip((clip, 16_000), short)
    assert len(checked_clip((clip[: 16_000 // 2], 16_000), short)) == 8_000
    unknown = part(wav_of(tone(0.75), 0xFFFFFFFE))
    with pytest.raises(ValueError, match="longer than 0.5 seconds|0.75 seconds long"):
        decoded(unknown, taken=short)


def test_bytes_are_bounded_together_by_the_rate_of_the_model() -> None:
    clip = part(saved(tone(1.0, 1000), rate=1000))  # 16 times as many at the model's rate
    opened = open_media(message(clip, clip), MediaAccess(), TAKEN, 256_000)[1]["audio"]
    assert [each.nbytes for each in opened] == [128_000] * 2
    with pytest.raises(ValueError, match="at most 255999 bytes together when they are decoded"):
        open_media(message(clip, clip), MediaAccess(), TAKEN, 255_999)


def test_sound_that_a_model_does_not_take_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_clips, "AudioFile", None)
    clip = part(saved(tone(0.1)), "wav")
    with pytest.raises(ValueError, match="^Seer takes no audio clips$"):
        decoded(clip, taken=TakenMedia("Seer", {"image": 8}))
    with pytest.raises(ValueError, match="^its tower is odd$"):
        decoded(clip, taken=TakenMedia("Seer", {"image": 8}, {"audio": "its tower is odd"}))
    with pytest.raises(ValueError, match="4 audio clips, and limit_mm_per_prompt allows 3: send fewer"):
        decoded(*[clip] * 4)


def test_arrays_of_callers_are_resampled() -> None:
    own = tone(1.0, 48_000)[:, 0].astype(np.float64)
    found = checked_clip((own, 48_000), TAKEN)
    assert found.dtype == np.float32 and len(found) == 16_000
    assert np.abs(found[2000:14_000] - tone(1.0)[2000:14_000, 0]).max() < 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_clip([0.0, 0.5], TAKEN).tolist() == [0.0, 0.5]
