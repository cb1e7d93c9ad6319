"""Sound in chat requests, by the official client."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("soxr", reason="needs the extra audio")

from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration  # noqa: E402

from tests.support.server_live import NAME, Live, live, until  # noqa: E402
from tests.support.sound_folders import RATE, sound, sound_folder  # noqa: E402
from torch_armllm.engine.media.audio_clips import AudioClip  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_folder(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def sound_server(folder: Path) -> Iterator[Live]:
    llm = AsyncLLM(
        str(folder),
        quantization=None,
        dtype="float32",
        kv_cache_memory=4 << 20,
        progress=False,
        limit_mm_per_prompt={"audio": 2},
    )
    with live(llm) as running:
        yield running
    llm.shutdown()


def wav(samples: Any, kind: str = "WAV", subtype: str | None = "FLOAT", rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def part(data: bytes, named: str = "wav") -> dict[str, Any]:
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(data).decode(), "format": named},
    }


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is said ?"}]}]


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)


def ask(server: Live, *parts: dict[str, Any]) -> str:
    answer = client_of(server).chat.completions.create(
        model=NAME,
        messages=messages(*parts),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Answers of transformers to three sounds of several lengths, each of words behind spaces."""
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    text = "user : <|audio_bos|><|AUDIO|><|audio_eos|> what is said ?  assistant :"
    texts = []
    for number, seconds in enumerate((0.7, 1.3, 2.0)):
        inputs = processor(
            text=[text], audio=[sound(number, seconds)], sampling_rate=RATE, return_tensors="pt"
        )
        ids = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        texts.append(" " + processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_answers_are_those_of_transformers_alone_and_together(
    sound_server: Live, expected: list[str]
) -> None:
    files = [wav(sound(0, 0.7)), wav(sound(1, 1.3), "FLAC", "PCM_24"), wav(sound(2, 2.0))]
    parts = [part(files[0]), part(files[1], "flac"), part(files[2])]
    assert len(set(expected)) == 3
    assert ask(sound_server, parts[0]) == expected[0]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda each: ask(sound_server, each), parts)) == expected
    url = "data:audio/wav;base64," + base64.b64encode(files[2]).decode()
    assert ask(sound_server, {"type": "audio_url", "audio_url": {"url": url}}) == expected[2]
    assert ask(sound_server, parts[0], parts[1]) != ask(sound_server, parts[1], parts[0])


def test_streams_and_responses_take_sound(sound_server: Live, expected: list[str]) -> None:
    client = client_of(sound_server)
    file = part(wav(sound(1, 1.3)))
    chunks = client.chat.completions.create(
        model=NAME,
        messages=messages(file),  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == expected[1] and len(deltas) > 2
    content: Any = [file, {"type": "input_text", "text": "what is said ?"}]
    answer = client.responses.create(
        model=NAME, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
    )
    assert answer.output_text and expected[1].startswith(answer.output_text)
    assert client.models.retrieve(NAME).input_modalities == ["text", "audio"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([part(b"RIFF0000WAVEjunk")], "no audio that can be decoded"),
        ([part(wav(sound(0)), "mp3")], "says that its format is 'mp3', and its data is WAV"),
        ([part(wav(sound(0)), "pcm16")], "format of an input_audio is 'pcm16'"),
        ([part(wav(np.array([0.0, np.nan])))], "not finite"),
        ([part(wav(np.zeros(0)))], "no samples"),
        (
            [part(wav(sound(0, 2.2)))],
            "leaves out the end of an audio clip of 2.2 seconds: send shorter clips",
        ),
        ([part(wav(sound(0, 0.1)))] * 3, "3 audio clips, and limit_mm_per_prompt allows 2"),
        ([part(wav(np.zeros(3600 * 1000), "FLAC", "PCM_16", 1000), "flac")], "3600 seconds long"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "input_audio part needs"),
        ([{"type": "input_audio"}], "needs input_audio"),
        ([{"type": "audio_url"}], "needs audio_url"),
        ([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}], "not fetched"),
        ([{"type": "audio", "audio": [0.0, 0.1]}], "content type 'audio' is not supported"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}], "takes no images"),
    ],
)
def test_bad_sound_is_refused_and_the_server_goes_on(
    sound_server: Live, bad: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(sound_server, *bad)
    until(lambda: not sound_server.served.prompts._budget._held)


def test_sound_for_a_model_of_texts_is_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_armllm.engine.media.audio_clips.AudioFile", None)
    with pytest.raises(openai.BadRequestError, match="is a model of text"):
        ask(server, part(wav(sound(0))))


def test_messages_of_anthropic_name_the_blocks_that_they_take(sound_server: Live) -> None:
    block = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": "AA"}}
    body = {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    response = httpx.post(f"{sound_server.base}/v1/messages", json=body)
    assert response.status_code == 400
    assert "blocks of type 'audio' are not supported here" in json.dumps(response.json())


def test_sounds_of_all_requests_share_a_budget(
    sound_server: Live, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    decode, waits = AudioClip.decoded, threading.Event()
    begun: list[float] = []

    def slow(self: AudioClip) -> Any:
        begun.append(self.nbytes)
        assert waits.wait(30)
        return decode(self)

    monkeypatch.setattr(AudioClip, "decoded", slow)
    budget = sound_server.served.prompts._budget
    monkeypatch.setattr(budget, "_most", 4 * RATE * 3)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, sound_server, part(wav(sound(0, 0.7)))) for _ in range(2)]
        until(lambda: len(begun) == 1)
        assert budget._held == begun[0] == 4 * 27_200  # 1.7 seconds at 16 kHz
        waits.set()
        assert [each.result(60) for each in asked] == [expected[0]] * 2
    assert len(begun) == 2
    until(lambda: not budget._held)
