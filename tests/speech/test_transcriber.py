"""Audio to text: files of all kinds, windows, languages, prompts, stops, and bad input."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.whisper_folder import sound, whisper_folder
from torch_armllm.engine.media.audio_files import read_audio
from torch_armllm.patching.state import patched_forward
from torch_armllm.speech.kind import transcribes
from torch_armllm.speech.transcriber import Stopped, Transcriber


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def transcriber(folder: Path) -> Transcriber:
    return Transcriber(str(folder), quantization=None, progress=False)


def test_results_are_those_of_transformers(folder: Path, transcriber: Transcriber) -> None:
    from transformers import WhisperForConditionalGeneration

    assert transcribes(str(folder)) and patched_forward(transcriber.model) is not None
    audio = read_audio(sound(4.0), 16000)
    found = transcriber(audio, language="de")
    own = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = transcriber.processor(audio, sampling_rate=16000, return_tensors="pt").input_features
    with torch.no_grad():
        ids = own.generate(features, return_timestamps=True, language="de", task="transcribe")
    text = transcriber.processor.tokenizer.batch_decode(ids, skip_special_tokens=True)[0]
    assert found.text == text.strip() and found.language == "de" and found.duration == 4.0
    assert all(0 <= each.start <= each.end <= 4.0 for each in found.segments)


def test_long_audio_is_cut_into_windows(transcriber: Transcriber) -> None:
    found = transcriber(sound(65.0))
    assert found.duration == 65.0 and found.language in ("en", "de")
    assert found.segments[-1].end > 30 and found.segments == sorted(found.segments, key=lambda s: s.start)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_files_of_all_kinds_are_read(kind: str) -> None:
    expected = read_audio(sound(1.0), 16000)
    found = read_audio(sound(1.0, 44100, 2, kind), 16000)
    assert found.dtype == np.float32 and found.ndim == 1 and abs(len(found) - 16000) <= 1
    tone = slice(4000, 12000)  # noise differs from rate to rate
    assert np.corrcoef(found[tone], expected[tone])[0, 1] > 0.9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the audio file is empty"),
        (b"not audio at all", "no audio that can be decoded"),
        (sound(1.0)[:30], "no audio that can be decoded"),
        (sound(0.0), "the audio has no samples"),
    ],
)
def test_bad_files_have_clear_errors(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_audio(data, 16000)


def test_long_files_of_silence_are_refused_before_they_fill_the_memory() -> None:
    with pytest.raises(ValueError, match="longer than 2 seconds"):
        read_audio(sound(3.0), 16000, most_seconds=2)


def test_parameters_that_do_not_fit_are_refused(transcriber: Transcriber) -> None:
    audio = sound(1.0)
    with pytest.raises(ValueError, match="language 'xx' is not one of the model's: de, en"):
        transcriber(audio, language="xx")
    with pytest.raises(ValueError, match="the prompt has .* tokens, and the model takes at most 31"):
        transcriber(audio, prompt="a" * 100)
    with pytest.raises(ValueError, match=r"not of shape \(0,\)"):
        transcriber(np.zeros(0, np.float32))
    with pytest.raises(Stopped):
        transcriber(audio, is_stopped=lambda: True)
    calls = iter([False] * 3 + [True] * 1000)
    with pytest.raises(Stopped):
        transcriber(audio, is_stopped=lambda: next(calls))


def test_prompts_tasks_and_temperatures(transcriber: Transcriber) -> None:
    audio = sound(2.0)
    for settings in ({"prompt": "Ada"}, {"task": "translate"}, {"temperature": 0.5}):
        assert transcriber(audio, **settings).duration == 2.0  # type: ignore[arg-type]


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not transcribes(str(tmp_path)) and not transcribes("smollm2")
    with pytest.raises(ValueError, match="is a llama; models that transcribe are whisper"):
        Transcriber(str(tmp_path))


def wav(rate: int, channels: int = 1, frames: int = 3000, size: int | None = None) -> bytes:
    """Returns a file of 8-bit samples; ``size``: bytes that its header claims."""
    data = bytes(range(64)) * (channels * frames // 64 + 1)
    data = data[: channels * frames]
    claimed = len(data) if size is None else size
    kind = struct.pack("<HHIIHH", 1, channels, rate, rate * channels & 0xFFFFFFFF, channels, 8)
    head = b"RIFF" + struct.pack("<I", 36 + claimed & 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", 16) + kind
    return head + b"data" + struct.pack("<I", claimed) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (wav(1), "1 samples a second; it may have 1000 to 768000"),
        (wav(999), "999 samples a second"),
        (wav(768_001), "768001 samples a second"),
        (wav(2**31 - 1), "2147483647 samples a second"),
        (wav(16000, 65), "65 channels, and may have 64"),
        (wav(16000, 1024), "1024 channels"),
    ],
)
def test_headers_that_are_no_audios_are_refused_before_anything_is_allocated(
    data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soundfile.SoundFile.blocks", lambda *args, **options: pytest.fail("decoded"))
    monkeypatch.setattr("soxr.ResampleStream", lambda *args, **options: pytest.fail("resampled"))
    with pytest.raises(ValueError, match=message):
        read_audio(data, 16000)


def test_unusual_headers_are_read() -> None:
    assert abs(len(read_audio(wav(1000), 16000)) - 48000) <= 1
    assert len(read_audio(wav(768_000), 16000)) > 0
    many = read_audio(wav(16000, 64, 5000), 16000)
    assert len(many) == 5000
    for size in (2**32 - 1, 2**31 - 1, 10**6):  # as of a program that writes to a pipe
        assert len(read_audio(wav(16000, size=size), 16000)) == 3000


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-45, 1e-10, 9e-6])
def test_the_lowest_temperatures_take_the_most_probable_tokens(
    transcriber: Transcriber, temperature: float
) -> None:
    assert transcriber(sound(0.5), language="en", temperature=temperature) == transcriber(
        sound(0.5), language="en"
    )


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e300])
def test_other_temperatures_are_refused(transcriber: Transcriber, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        transcriber(sound(0.5), temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e38])
def test_temperatures_draw(transcriber: Transcriber, temperature: float) -> None:
    assert transcriber(sound(0.5), language="en", temperature=temperature).duration == 0.5


def test_times_are_no_text(transcriber: Transcriber) -> None:
    zero = transcriber.model.generation_config.no_timestamps_token_id + 1
    tokens = torch.tensor([zero, 5, zero + 2])
    segment = transcriber._segment({"start": 0.0, "end": 9.0, "tokens": tokens}, 2.0)
    assert segment.token_ids == [5] and (segment.start, segment.end) == (0.0, 2.0)
