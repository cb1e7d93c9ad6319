"""Videos in chat requests, by the official client: files and images, streamed and whole."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("torchvision", reason="needs torchvision, as processors of videos do")
pytest.importorskip("av", reason="needs the extra video")

from PIL import Image  # noqa: E402

from tests.support.picture_folders import TEMPLATE, picture_folder  # noqa: E402
from tests.support.server_live import NAME, Live, live  # noqa: E402
from tests.support.video_files import shades, video_bytes, video_file  # noqa: E402
from torch_armllm import SamplingParams  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402
from torch_armllm.llm.llm import LLM  # noqa: E402

OPTIONS: dict[str, Any] = {"quantization": None, "dtype": "float32", "kv_cache_memory": 4 << 20}
FRAMES = shades(12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = picture_folder(tmp_path_factory.mktemp("videos") / "qwen3_vl", "qwen3_vl")
    words = "{% else %} {{ part.text }}"
    template = TEMPLATE.replace(words, "{% elif part.type == 'video' %}<|video_pad|>" + words)
    (made / "chat_template.jinja").write_text(template.replace("IMAGE", "<|image_pad|>"))
    video_file(made / "film.mp4", FRAMES)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    llm = AsyncLLM(str(folder), progress=False, allowed_media_path=folder, **OPTIONS)
    with live(llm) as running:
        yield running
    llm.shutdown()


def client(server: Live) -> Any:
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)


def message(value: Any) -> list[Any]:
    parts = [{"type": "video_url", "video_url": value}, {"type": "text", "text": "what is this"}]
    return [{"role": "user", "content": parts}]


def image_url(frame: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def file_url(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["data", "file", "images"])
def test_answers_are_those_of_the_llm(server: Live, folder: Path, kind: str) -> None:
    value: dict[str, Any] = {
        "data": {"url": file_url(video_bytes(FRAMES)), "num_frames": 4},
        "file": {"url": (folder / "film.mp4").as_uri(), "num_frames": 6},
        "images": {"url": [image_url(frame) for frame in FRAMES[:3]], "fps": 1.0},
    }[kind]
    llm = LLM(str(folder), progress=False, allowed_media_path=folder, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (wanted,) = llm.chat(message(value), params, use_tqdm=False)
    given: dict[str, Any] = {"model": NAME, "messages": message(value), "max_tokens": 8, "temperature": 0}
    given["extra_body"] = {"ignore_eos": True}
    whole = client(server).chat.completions.create(**given)
    assert whole.choices[0].message.content == wanted.outputs[0].text
    assert whole.usage.prompt_tokens == len(wanted.prompt_token_ids or ())
    streamed = client(server).chat.completions.create(**given, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == wanted.outputs[0].text


def test_the_model_says_that_it_takes_videos(server: Live) -> None:
    (card,) = client(server).models.list().data
    assert card.input_modalities == ["text", "image", "video"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"url": file_url(b"no video at all" * 9)}, "a video file cannot be read"),
        ({"url": file_url(video_bytes(FRAMES)[:-900])}, "cannot be read|is cut off"),
        ({"url": file_url(video_bytes(FRAMES[:0], audio=True))}, "has no video"),
        ({"url": "http://localhost/film.mp4"}, "is not fetched from 'localhost'"),
        ({"url": "file:///etc/passwd"}, "leads out of the folder"),
        ({"url": []}, "a list of 1 to 1024 images"),
        ({"url": file_url(b""), "fps": -1.0}, "the fps of a video are -1"),
        ({"num_frames": 4}, "url"),
    ],
)
def test_bad_videos_are_errors_of_the_request(server: Live, value: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client(server).chat.completions.create(model=NAME, messages=message(value), max_tokens=1)
    answer = client(server).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "what is"}], max_tokens=1
    )
    assert answer.usage.completion_tokens == 1


def test_videos_are_counted(server: Live) -> None:
    content = message({"url": [image_url(FRAMES[0])]})[0]["content"]
    conversation = [{"role": "user", "content": content * 3}]
    with pytest.raises(openai.BadRequestError, match="has 3 videos, and limit_mm_per_prompt allows 2"):
        client(server).chat.completions.create(model=NAME, messages=conversation, max_tokens=1)
