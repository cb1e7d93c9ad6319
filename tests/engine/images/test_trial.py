"""Models are tried with an image, a video and a sound when they are loaded; sounds and videos of prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra vision")

from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor  # noqa: E402

import torch_armllm  # noqa: E402
from tests.support.picture_folders import (  # noqa: E402
    PLACEHOLDERS,
    Qwen2VLPictures,
    picture,
    picture_folder,
    qwen_model,
)
from tests.support.sound_folders import RATE, sound, sound_folder  # noqa: E402
from torch_armllm import LLM, SamplingParams  # noqa: E402
from torch_armllm.engine.build import build_engine  # noqa: E402
from torch_armllm.engine.config import EngineConfig  # noqa: E402
from torch_armllm.engine.images.decoder_call import ReadingModel  # noqa: E402
from torch_armllm.engine.images.media_facts import MediaFacts  # noqa: E402
from torch_armllm.engine.images.prompt_rows import PromptRows  # noqa: E402
from torch_armllm.engine.images.reader import PictureReader  # noqa: E402
from torch_armllm.engine.media.video import as_video, video_arguments  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def continued(model: Any, inputs: Any) -> list[int]:
    """Returns what the model's own ``generate`` continues a prompt with."""
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return list(ids[0, inputs["input_ids"].shape[1] :].tolist())


def check(folder: Path, model: Any, prompts: list[dict[str, Any]], inputs: list[Any]) -> None:
    """Compares answers, all at once, in chunks of prompts and from the prefix cache, with transformers'."""
    wanted = [continued(model, each) for each in inputs]
    assert wanted[0] != wanted[1]
    options: dict[str, Any] = {"kv_cache_memory": 4 << 20, "progress": False, "max_num_seqs": 5}
    for tokens in (7, 512):
        llm = LLM(str(folder), quantization=None, dtype="float32", max_num_batched_tokens=tokens, **options)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert outputs[-1].num_cached_tokens > 0


def test_answers_about_sounds_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2AudioForConditionalGeneration

    folder = sound_folder(tmp_path / "sounds")
    processor = AutoProcessor.from_pretrained(folder)
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    texts = [
        (f"what is {mark} said", [sound(0)]),
        (f"what is {mark} said", [sound(1, 0.4)]),
        (f"{mark} w1 {mark} w2", [sound(2, 1.7), sound(3, 0.2)]),
    ]
    prompts: list[Any] = [{"prompt": t, "multi_modal_data": {"audio": clips}} for t, clips in texts]
    inputs = [processor(text=[t], audio=clips, return_tensors="pt", sampling_rate=RATE) for t, clips in texts]
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    check(folder, model, prompts, inputs)


@pytest.mark.parametrize("kind", ["qwen2_vl", "internvl"])
def test_answers_about_videos_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    folder = picture_folder(tmp_path / kind, kind)
    processor = AutoProcessor.from_pretrained(folder)
    mark = "<video>" if kind == "internvl" else PLACEHOLDERS[kind].replace("image", "video")
    random = np.random.default_rng(0)
    clips = [
        as_video((random.integers(0, 256, (count, 24, 40, 3), dtype=np.uint8), {"fps": 2.0}))
        for count in (4, 6)
    ]
    options: dict[str, Any] = {}
    if kind.startswith("qwen"):  # pixels of all frames
        options["size"] = {"shortest_edge": 256, "longest_edge": 4096}
    prompts: list[Any] = [
        {
            "prompt": f"what {mark} is this",
            "multi_modal_data": {"video": tuple(clip)},
            "mm_processor_kwargs": options,
        }
        for clip in clips
    ]
    inputs = [
        processor(text=[prompt["prompt"]], return_tensors="pt", **video_arguments([clip]), **options)
        for prompt, clip in zip(prompts, clips, strict=True)
    ]
    for each in inputs:
        each.pop("video_metadata", None)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    check(folder, model, prompts, inputs)


def moved(module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**named, "position_ids": 2 * named["position_ids"]}


def doubled(module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return (2 * args[0], *args[1:]), named


def told(module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**named, "kinds": torch.ones(3)}


def patched_with(hook: Callable[..., Any], of: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns a patched Qwen2-VL of which a hook changes what a module is given, and the module."""
    model = qwen_model("qwen2_vl")
    assert torch_armllm.patch(model, None, progress=False).captured
    module = of(model)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    return model, module


def reader_of(model: Any) -> PictureReader | str:
    processor = Qwen2VLPictures()
    return build_engine(
        model, processor.tokenizer, EngineConfig(kv_cache_memory=4 << 20), processor
    ).preprocessor.pictures


def test_a_model_whose_plan_computes_others_is_refused() -> None:
    """Its layers do something that the plan does not; positions that the plan knows do no harm."""
    model, _ = patched_with(doubled, lambda model: model.model.language_model.layers[1])
    reason = reader_of(model)
    assert isinstance(reason, str) and "served for text only" in reason
    assert "adds features" in reason or "other hidden states" in reason
    model, _ = patched_with(moved, lambda model: model.model.language_model)
    assert isinstance(reader_of(model), PictureReader)


def test_prompts_that_differ_from_the_trial_are_refused() -> None:
    """An argument that the trial did not show could change anything."""
    from PIL import Image

    model = qwen_model("qwen2_vl")
    assert torch_armllm.patch(model, None, progress=False).captured
    reader = reader_of(model)
    assert isinstance(reader, PictureReader)
    prompt = {"prompt": "<|image_pad|> what", "multi_modal_data": {"image": Image.new("RGB", (32, 16))}}
    assert reader.read(prompt, lambda ids: None)[1] is not None
    model.model.language_model.register_forward_pre_hook(told, with_kwargs=True)
    with pytest.raises(ValueError, match="is given kinds, which plans do not know"):
        reader.read(prompt, lambda ids: None)


@pytest.mark.parametrize("window", [3, 4])
def test_an_image_that_is_longer_than_a_window_which_does_not_cut_it_is_refused(
    window: int, tmp_path: Path
) -> None:
    """Its first token is seen by its last one, as in Gemma 4, and not by that of a plan, as in Gemma 3."""
    folder = picture_folder(tmp_path / "gemma3", "gemma3")
    config = AutoConfig.from_pretrained(folder)
    config.text_config.sliding_window = window
    model = AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    reading = ReadingModel(model.model, model.model.forward, nullcontext)
    text = {"text": ["what is <start_of_image> this"], "return_mm_token_type_ids": True}
    inputs = AutoProcessor.from_pretrained(folder)(images=[[picture(0)]], return_tensors="pt", **text)
    call, ids = reading.decoder_call(dict(inputs)), inputs["input_ids"][0]
    rows = PromptRows(reading, MediaFacts(("image",), looks_ahead="all"))
    spans = rows.of(ids, call, torch.float32).spans
    assert [last - first for first, last in spans] == [4]
    (first, last), mask = spans[0], call.mask["sliding_attention"]
    mask[..., first:last, first:last] = True
    if window == 4:
        assert rows.of(ids, call, torch.float32).spans == spans
        return
    with pytest.raises(ValueError, match="an item of 4 tokens is longer than the window of 3 tokens"):
        rows.of(ids, call, torch.float32)
    mask[..., last, 0] = True
    with pytest.raises(ValueError, match="attend to others than the earlier ones"):
        rows.of(ids, call, torch.float32)


def test_what_a_model_does_not_take_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = sound_folder(tmp_path / "sounds")
    with caplog.at_level(logging.INFO, "torch_armllm"):
        llm = LLM(str(folder), quantization=None, dtype="float32", kv_cache_memory=4 << 20, progress=False)
    assert "its processor takes no images" in caplog.text
    with pytest.raises(ValueError, match="takes no images"):
        llm.generate({"prompt": "w1", "multi_modal_data": {"image": picture_of(1)}}, GREEDY, use_tqdm=False)


def picture_of(size: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (size, size))
