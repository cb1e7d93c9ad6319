"""Audio to text: files of all kinds, windows, languages, prompts, stops, and bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.whisper_folder import sound, whisper_folder
from torch_armllm.patching.state import patched_forward
from torch_armllm.speech.audio import read_audio
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
