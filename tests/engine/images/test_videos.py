"""Prompts with videos compute what transformers computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision", reason="needs torchvision, as processors of videos do")

from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata, load_video  # noqa: E402

from tests.support.picture_folders import PLACEHOLDERS, picture, picture_folder  # noqa: E402
from tests.support.video_files import shades, video_file  # noqa: E402
from torch_armllm import LLM, SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MARKS = {
    "qwen2_vl": "<|video_pad|>",
    "qwen2_5_vl": "<|video_pad|>",
    "qwen3_vl": "<|video_pad|>",
    "internvl": "<video>",
}
"""Stand for a video in the texts of each kind of model."""
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'video' %} VIDEO "
    "{% else %} {{ part.text }} {% endif %}{% endfor %}{% endfor %} assistant :"
)


@pytest.fixture(scope="module", params=sorted(MARKS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp(request.param) / request.param, request.param)


def engine(folder: Path, **settings: Any) -> LLM:
    options = {"kv_cache_memory": 4 << 20, "progress": False, **settings}
    return LLM(str(folder), quantization=None, dtype="float32", **options)


def noise(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def expected(folder: Path, text: str, videos: list[Any], images: list[Any] | None = None) -> list[int]:
    """Returns what the model's own ``generate`` continues a text with.

    Args:
        folder: of the model.
        text: with placeholders.
        videos: sampled frames, and metadata of each video.
        images: beside them.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = processor(
        text=[text],
        videos=[frames for frames, _ in videos],
        video_metadata=[VideoMetadata(**metadata) for _, metadata in videos],
        do_sample_frames=False,
        return_tensors="pt",
        **({} if images is None else {"images": images}),
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def metadata(count: int, fps: float, *places: int) -> dict[str, Any]:
    return {"total_num_frames": count, "fps": fps, "frames_indices": list(places or range(count))}


def test_answers_are_those_of_transformers(folder: Path) -> None:
    """Frames of several sizes, numbers and rates; all at once, in chunks, and from the prefix cache."""
    mark, image = MARKS[folder.name], PLACEHOLDERS[folder.name]
    one, two = (noise(0, 4, 40, 33), metadata(4, 2.0)), (noise(1, 4, 24, 61), metadata(13, 24.0, 0, 4, 8, 12))
    cases: list[tuple[str, list[Any], list[Any] | None]] = [
        (f"what is {mark} this", [one], None),
        (f"{mark} this", [two], None),
        (f"what {mark} {'cat dog ' * 9} {mark} is this", [two, one], None),
        (f"what {image} is {mark} this {image} cat", [one], [picture(0), picture(1, 60, 31)]),
    ]
    prompts, wanted = [], []
    for text, videos, images in cases:
        data = {"video": videos} if images is None else {"video": videos, "image": images}
        prompts.append({"prompt": text, "multi_modal_data": data})
        wanted.append(expected(folder, text, videos, images))
    assert wanted[0] != wanted[1]
    for tokens in (7, 512):
        llm = engine(folder, max_num_batched_tokens=tokens, max_num_seqs=5)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert outputs[2].num_cached_tokens > 0


def test_a_file_is_sampled_as_transformers_samples_it(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs the extra video")
    path = video_file(tmp_path / "film.mp4", shades(40), rate=10)
    processor = AutoProcessor.from_pretrained(folder)
    sampler = processor.video_processor
    options = {name: getattr(sampler, name, None) for name in sampler.valid_kwargs.__annotations__}
    options |= {"num_frames": 6, "fps": None}
    frames, facts = load_video(
        str(path), backend="pyav", sample_indices_fn=partial(sampler.sample_frames, **options)
    )
    facts["duration"] = facts.total_num_frames / facts.fps
    wanted = expected(folder, f" {MARKS[folder.name]}  what is this  assistant :", [(frames, dict(facts))])
    llm = engine(folder, allowed_media_path=tmp_path)
    url = {"url": path.as_uri(), "num_frames": 6}
    parts = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "what is this"}]
    template = TEMPLATE.replace("VIDEO", MARKS[folder.name])
    conversation = [{"role": "user", "content": parts}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template=template)
    assert output.outputs[0].token_ids == wanted


def test_timestamps_are_those_of_the_file(tmp_path: Path) -> None:
    """Qwen3-VL writes the mean time of each two frames before their tokens."""
    pytest.importorskip("av", reason="needs the extra video")
    folder = picture_folder(tmp_path / "qwen3_vl", "qwen3_vl")
    path = video_file(tmp_path / "film.mp4", shades(40), rate=10)
    llm = engine(folder, allowed_media_path=tmp_path)
    reader = llm.picture_reader()
    texts: list[str] = []
    own = reader.processor.tokenizer._encode_plus

    def noted(text: Any, *args: Any, **options: Any) -> Any:
        texts.append(text if isinstance(text, str) else text[0])
        return own(text, *args, **options)

    reader.processor.tokenizer._encode_plus = noted
    url = {"url": path.as_uri(), "num_frames": 4}
    parts = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "what"}]
    template = TEMPLATE.replace("VIDEO", MARKS["qwen3_vl"])
    llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False, chat_template=template)
    (shown,) = {text for text in texts if "seconds" in text}
    assert "<0.7 seconds>" in shown and "<3.2 seconds>" in shown  # frames 0, 13, 26 and 39


def test_others_than_videos_are_refused(tmp_path: Path) -> None:
    llm = engine(picture_folder(tmp_path / "internvl", "internvl"))
    bad = {"a video is a str": "a.mp4", "of 0 frames": noise(0, 0, 40, 33), "too small": noise(0, 2, 4, 33)}
    for message, value in bad.items():
        prompt = {"prompt": "<video> what", "multi_modal_data": {"video": value}}
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, GREEDY, use_tqdm=False)
    several = {"prompt": "<video> what", "multi_modal_data": {"video": [noise(0, 2, 40, 33)] * 3}}
    with pytest.raises(ValueError, match="the prompt has 3 videos, and limit_mm_per_prompt allows 2"):
        llm.generate(several, GREEDY, use_tqdm=False)
    assert llm.generate("what is", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
