"""Routes of models that transcribe, by OpenAI's client: formats, limits, and errors."""

from __future__ import annotations

import gc
import io
import resource
import signal
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_live import NAME, Live, live
from tests.support.whisper_folder import sound, whisper_folder
from torch_armllm import AsyncLLM
from torch_armllm.speech.subtitles import srt, vtt
from torch_armllm.speech.transcriber import Transcriber
from torch_armllm.system.allocator import release_free_memory

pytestmark = pytest.mark.usefixtures("warm_processes")
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    return Transcriber(str(whisper_folder(tmp_path_factory.mktemp("whisper"))), progress=False)


@pytest.fixture(scope="module")
def server(tiny_llm: AsyncLLM, transcriber: Transcriber) -> Iterator[Live]:
    """A server of a language model and one that transcribes."""
    with live(tiny_llm, max_audio_bytes=200_000, max_request_bytes=5000, max_queue=2) as server:
        server.registry.add_speech(transcriber, "whisper", "")
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)


def test_formats(client: OpenAI, transcriber: Transcriber) -> None:
    audio = sound(2.0)
    expected = transcriber(audio, language="en")
    create = client.audio.transcriptions.create
    arguments = {"model": "whisper", "file": ("a.wav", audio), "language": "en"}
    assert create(**arguments).text == expected.text  # type: ignore[call-overload]
    assert create(**arguments, response_format="text").strip() == expected.text  # type: ignore[call-overload]
    found = create(  # type: ignore[call-overload]
        **arguments, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (found.text, found.language, found.duration) == (expected.text, "en", 2.0)
    assert [each.text for each in found.segments] == [each.text for each in expected.segments]
    assert [each.end for each in found.segments] == [round(each.end, 2) for each in expected.segments]
    translated = client.audio.translations.create(model="whisper", file=("a.flac", sound(1.0, kind="FLAC")))
    assert translated.text == transcriber(sound(1.0, kind="FLAC"), task="translate").text


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_have_the_segments(client: OpenAI, transcriber: Transcriber, kind: Any) -> None:
    audio = sound(2.0)
    expected = transcriber(audio, language="en")
    found = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", audio), language="en", response_format=kind
    )
    assert found == {"srt": srt, "vtt": vtt}[kind](expected)
    assert str(found).count(" --> ") == sum(bool(each.text.strip()) for each in expected.segments) > 0


def test_metrics_count_audio_and_responses(tiny_llm: AsyncLLM, transcriber: Transcriber) -> None:
    with live(tiny_llm) as server:
        server.registry.add_speech(transcriber, "whisper", "")
        for data in (sound(2.0), sound(1.0), b""):
            httpx.post(server.base + PATH, files={"file": ("a.wav", data)}, timeout=60)
        httpx.get(f"{server.base}/v1/models/{NAME}")
        for path in ("/none", "/nothing"):
            httpx.get(server.base + path)
        page = httpx.get(f"{server.base}/metrics").text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    found = {
        s.name: s.value for s in samples if s.labels.get("model_name") == "whisper" and "le" not in s.labels
    }
    assert found["armllm:audio_seconds_total"] == 3.0
    assert found["vllm:request_success_total"] == found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["armllm:audio_real_time_speed_count"] == 2 and found["armllm:audio_real_time_speed_sum"] > 0
    computing = found["vllm:request_inference_time_seconds_sum"]
    assert 0 < computing <= found["vllm:e2e_request_latency_seconds_sum"]
    responses = {
        (s.labels["endpoint"], s.labels["status"]): s.value
        for s in samples
        if s.name == "armllm:http_responses_total"
    }
    assert responses == {
        (PATH, "200"): 2,
        (PATH, "400"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("other", "404"): 2,
    }


def test_models_are_listed_and_of_one_kind(client: OpenAI, server: Live) -> None:
    cards = {each.id: each.model_dump() for each in client.models.list()}
    assert cards["whisper"]["tasks"] == ["transcribe", "translate"] and NAME in cards
    assert client.models.retrieve("whisper").id == "whisper"
    with pytest.raises(BadRequestError, match="transcribes: send audio to /v1/audio/transcriptions"):
        client.completions.create(model="whisper", prompt="a")
    with pytest.raises(BadRequestError, match="does not transcribe; models that do: 'whisper'"):
        client.audio.transcriptions.create(model=NAME, file=("a.wav", sound(1.0)))
    with pytest.raises(NotFoundError, match="models that transcribe: 'whisper'"):
        client.audio.transcriptions.create(model="other", file=("a.wav", sound(1.0)))


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (b"", {}, "the audio file is empty"),
        (b"\0" * 500, {}, "no audio that can be decoded"),
        (sound(1.0)[:20], {}, "no audio that can be decoded"),
        (sound(0.0), {}, "the audio has no samples"),
        (sound(0.1), {"language": "xx"}, "language 'xx' is not one of"),
        (sound(0.1), {"response_format": "ass"}, "response_format"),
        (sound(0.1), {"temperature": "2"}, "temperature"),
        (sound(0.1), {"stream": "true"}, "stream"),
        (sound(0.1), {"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (sound(0.1), {"unknown": "1"}, "unknown"),
    ],
)
def test_bad_requests_are_the_clients_fault(
    server: Live, data: bytes, fields: dict[str, str], message: str
) -> None:
    got = httpx.post(server.base + PATH, files={"file": ("a.wav", data)}, data=fields, timeout=60)
    assert got.status_code == 400 and message in got.json()["error"]["message"], got.text


def test_the_lowest_temperature_is_none(server: Live) -> None:
    files = {"file": ("a.wav", sound(0.1))}
    got = httpx.post(server.base + PATH, files=files, data={"temperature": "1e-320"}, timeout=60)
    assert got.status_code == 200, got.text


def test_forms_without_a_file(server: Live) -> None:
    for options in ({"json": {"model": "whisper"}}, {"data": {"file": "text"}}, {"content": b"x"}):
        got = httpx.post(server.base + PATH, **options)  # type: ignore[arg-type]
        assert got.status_code == 400, got.text
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    got = httpx.post(server.base + PATH, content=b"--y\r\nno form", headers=broken)
    assert got.status_code == 400, got.text
    twice = [("file", ("a.wav", b"1")), ("file", ("b.wav", b"2"))]
    assert httpx.post(server.base + PATH, files=twice).status_code == 400


def test_files_that_are_too_large_are_refused(server: Live) -> None:
    got = httpx.post(server.base + PATH, files={"file": ("a.wav", b"\0" * 10_000_000)}, timeout=60)
    assert got.status_code == 413 and "at most 200000 bytes" in got.json()["error"]["message"]
    got = httpx.post(server.base + "/v1/completions", content=b" " * 6000)
    assert got.status_code == 413 and "at most 5000 bytes" in got.json()["error"]["message"]


def silence(seconds: int, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, rate, 0, "NONE", ""))
        opened.writeframes(bytes(2 * rate * seconds))
    return file.getvalue()


def resident_bytes() -> int:
    release_free_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_large_files_is_given_back(server: Live) -> None:
    wide = {"max_audio_bytes": 1 << 30, "max_request_bytes": 5000}
    with live(server.llm, **wide) as other:
        other.registry.add_speech(server.registry.speech["whisper"].transcriber, "whisper", "")
        post = partial(httpx.post, other.base + PATH, timeout=60)
        large = [
            (b"\0" * 70_000_000, "no audio that can be decoded"),
            (silence(3601, 10_000), "longer than 3600 seconds"),
        ]
        assert all(len(data) >= 70_000_000 for data, _ in large)

        def refusals() -> int:
            """Bytes that stay resident after large files are refused and a small one is taken."""
            for data, message in large:
                got = post(files={"file": ("a.wav", data)})
                assert got.status_code == 400 and message in got.json()["error"]["message"]
            assert post(files={"file": ("a.wav", sound(1.0))}).status_code == 200
            gc.collect()
            return resident_bytes()

        # The first round leaves what allocators keep, the next ones would leave 140 MB each.
        first = refusals()
        assert min(refusals() for _ in range(2)) < first + 100_000_000


def test_a_full_queue_refuses_and_late_requests_end(
    tiny_llm: AsyncLLM, transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    inputs = transcriber._inputs
    monkeypatch.setattr(transcriber, "_inputs", lambda audio: held.wait(30) and inputs(audio))
    with live(tiny_llm, max_queue=1, request_timeout=0.5) as server, ThreadPoolExecutor(2) as pool:
        server.registry.add_speech(transcriber, "whisper", "")

        def post() -> httpx.Response:
            return httpx.post(server.base + PATH, files={"file": ("a.wav", sound(1.0))}, timeout=60)

        waiting = [pool.submit(post) for _ in range(2)]
        served = server.registry.speech["whisper"]
        while served.admission.num_admitted < 2:
            threading.Event().wait(0.01)
        assert post().status_code == 429
        threading.Event().wait(0.6)
        held.set()
        assert [each.result().status_code for each in waiting] == [504, 504]


def test_the_command_serves_a_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch_armllm",
        "serve",
        str(whisper_folder(tmp_path)),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(line for line in process.stdout if line.startswith("serving")).split()[-1]
            files = {"file": ("a.wav", sound(1.0))}
            got = httpx.post(f"{address}/audio/transcriptions", files=files, timeout=60)
            assert got.status_code == 200 and "text" in got.json()
            got = httpx.post(f"{address}/completions", json={"prompt": "a"})
            assert got.status_code == 400 and "transcribes: send audio" in got.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_server_without_such_a_model_says_so(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm) as server:
        got = httpx.post(server.base + PATH, files={"file": ("a.wav", sound(0.1))})
        assert got.status_code == 400 and "no served model transcribes" in got.json()["error"]["message"]
