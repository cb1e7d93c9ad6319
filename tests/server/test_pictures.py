"""Pictures in chat requests, by the official client."""

from __future__ import annotations

import base64
import io
import resource
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from tests.support.picture_folders import picture, picture_folder  # noqa: E402
from tests.support.server_live import NAME, Live, live, until  # noqa: E402
from torch_armllm import SamplingParams  # noqa: E402
from torch_armllm.engine.media.image_files import OpenedImage  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402
from torch_armllm.llm.llm import LLM  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    (path / "cat.png").write_bytes(png(3))
    (path.parent / "secret.png").write_bytes(png(3))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    return path


@pytest.fixture(scope="module")
def pictures_server(folder: Path, media: Path) -> Iterator[Live]:
    llm = AsyncLLM(
        str(folder),
        quantization=None,
        dtype="float32",
        kv_cache_memory=4 << 20,
        progress=False,
        limit_mm_per_prompt={"image": 2},
        allowed_media_path=media,
    )
    with live(llm) as running:
        yield running
    llm.shutdown()


def png(number: int) -> bytes:
    """Returns a picture as a PNG file."""
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def damaged_png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Returns a PNG file of these sizes, with chunks before its data, which are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), *chunks, (b"IDAT", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def messages(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this"}]}]


def ask(server: Live, conversation: list[dict[str, Any]]) -> str:
    client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=NAME, messages=conversation, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 8
    return answer.choices[0].message.content


def test_answers_are_those_of_the_offline_engine(pictures_server: Live, folder: Path, media: Path) -> None:
    llm = LLM(str(folder), quantization=None, dtype="float32", kv_cache_memory=4 << 20, progress=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for numbers in ((3,), (4,), (3, 4)):
        conversation = messages(*(data_url(png(number)) for number in numbers))
        wanted = llm.chat(conversation, params, use_tqdm=False)[0].outputs[0].text
        assert ask(pictures_server, conversation) == wanted
    by_file = messages(f"file://{media}/cat.png")
    assert ask(pictures_server, by_file) == ask(pictures_server, messages(data_url(png(3))))


def test_responses_are_those_of_the_chat_route(pictures_server: Live) -> None:
    client = openai.OpenAI(base_url=f"{pictures_server.base}/v1", api_key="none", max_retries=0)
    url = data_url(png(3))
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what is this"}]
    answer = client.responses.create(
        model=NAME,
        input=[{"role": "user", "content": parts}],
        temperature=0,
        max_output_tokens=8,
    )
    assert answer.output_text == ask(pictures_server, messages(url))
    parts[0] = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(openai.BadRequestError, match="input_image needs image_url"):
        client.responses.create(model=NAME, input=[{"role": "user", "content": parts}])


def test_streams_and_texts_work_beside_pictures(pictures_server: Live) -> None:
    client = openai.OpenAI(base_url=f"{pictures_server.base}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        model=NAME, messages=messages(data_url(png(5))), temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert ask(pictures_server, [{"role": "user", "content": "what is this"}])


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([data_url(png(1)[:-40])], "damaged"),
        ([data_url(b"GIF89a")], "cannot be read"),
        ([data_url(b"<svg></svg>")], "cannot be read"),
        ([data_url(damaged_png(60000, 60000))], "pixels"),
        ([data_url(damaged_png(6000, 6000))], "too large"),
        ([data_url(damaged_png(1, 201))], "too narrow"),
        ([data_url(damaged_png(9, 9, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))))], "read"),
        ([data_url(damaged_png(9, 9, (b"eXIf", b"MM\0*\xff\xff\xff\xff")))], "damaged"),
        ([data_url(png(1))] * 3, "allows 2"),
        (["data:image/png,plain"], "base64"),
        (["data:image/png;base64,!!"], "base64"),
        (["http://127.0.0.1/cat.png"], "not fetched"),
        (["file:///etc/passwd"], "leads out"),
        (["MEDIA/../secret.png"], "leads out"),
        (["MEDIA/link.png"], "leads out"),
        (["MEDIA/none.png"], "names no file"),
        ([""], "image_url part needs"),
    ],
    ids=[
        *(
            "cut",
            "short",
            "svg",
            "bomb",
            "large",
            "narrow",
            "text-bomb",
            "exif",
            "count",
            "plain",
            "no-base64",
        ),
        *("http", "outside", "dots", "link", "missing", "empty"),
    ],
)
def test_bad_pictures_are_refused(pictures_server: Live, media: Path, urls: list[str], said: str) -> None:
    urls = [url.replace("MEDIA", f"file://{media}") for url in urls]
    with pytest.raises(openai.BadRequestError, match=said):
        ask(pictures_server, messages(*urls))


def resident() -> int:
    """Returns the bytes of memory that this process holds; the server runs in it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_pictures_are_refused_and_the_server_goes_on(pictures_server: Live) -> None:
    url = data_url(png(1))
    answer = ask(pictures_server, messages(url))
    begin = time.perf_counter()
    with pytest.raises(openai.APIStatusError) as refused:
        ask(pictures_server, messages(*[url] * 10_000))
    assert 400 <= refused.value.status_code < 500 and time.perf_counter() - begin < 30
    small = io.BytesIO()
    picture(1, 1, 1).save(small, "PNG")
    before = resident()
    with pytest.raises(openai.BadRequestError, match="10000 images, and limit_mm_per_prompt allows 2"):
        ask(pictures_server, messages(*[data_url(small.getvalue())] * 10_000))
    assert resident() - before < 100 << 20
    assert ask(pictures_server, messages(url)) == answer


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "needs image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "needs input_audio"),
        (
            {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "cannot hold images",
        ),
    ],
    ids=["no-url", "audio", "system"],
)
def test_bad_parts_are_refused(pictures_server: Live, message: dict[str, Any], said: str) -> None:
    body = {"model": NAME, "messages": [message]}
    response = httpx.post(f"{pictures_server.base}/v1/chat/completions", json=body)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


def test_a_model_of_text_takes_no_pictures(server: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no pictures"):
        ask(server, messages(data_url(png(1))))


def test_bytes_of_a_request_are_bounded_together(
    pictures_server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_armllm.server.prompts.MOST_BYTES_TOGETHER", 7_600_000)
    monkeypatch.setattr(OpenedImage, "decoded", lambda self: pytest.fail("a picture was decoded"))
    big = data_url(damaged_png(1000, 1000))
    for count in (1, 2):
        with pytest.raises(openai.APIStatusError) as refused:
            ask(pictures_server, messages(*[big] * count))
        together = "at most 7600000 bytes together" in str(refused.value)
        assert together == (count == 2) and (refused.value.status_code == 400) == together


def test_texts_do_not_wait_for_pictures(pictures_server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = OpenedImage.decoded
    answered = threading.Event()

    def slow(self: OpenedImage) -> Any:
        assert answered.wait(30)
        return decode(self)

    monkeypatch.setattr(OpenedImage, "decoded", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, pictures_server, messages(data_url(png(3))))
        assert ask(pictures_server, [{"role": "user", "content": "what is this"}])
        assert not asked.done()
        answered.set()
        assert asked.result(30)
    until(lambda: not pictures_server.served.prompts._budget._held)


def test_failed_requests_give_their_bytes_back(pictures_server: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="damaged"):
        ask(pictures_server, messages(data_url(png(1)[:-40])))
    until(lambda: not pictures_server.served.prompts._budget._held)
