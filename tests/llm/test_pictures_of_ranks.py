"""Prompts with pictures in several processes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from tests.support.picture_folders import (  # noqa: E402
    PLACEHOLDERS,
    WIDE,
    Qwen2VLPictures,
    picture,
    picture_folder,
    qwen_model,
)
from torch_armllm import LLM, SamplingParams  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_processes")
OPTIONS: dict[str, Any] = {
    **{"quantization": "int8", "dtype": "bfloat16", "kv_cache_memory": 4 << 20, "speculative_config": None},
    **{"progress": False, "threads": 1, "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "limit_mm_per_prompt": {"image": 2},
}
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    """Loads a model; transformers' processor of Qwen's needs torchvision, so they get another."""
    if folder.name.startswith("qwen"):
        for module in ("loading.loader", "ranks.loader"):
            name = f"torch_armllm.llm.{module}.load_processor"
            monkeypatch.setattr(name, lambda model, source: Qwen2VLPictures())
    return LLM(str(folder), **{**OPTIONS, **settings})


def saved(folder: Path, kind: str) -> Path:
    if not kind.startswith("qwen"):
        return picture_folder(folder / kind, kind, **WIDE)
    qwen_model(kind, **WIDE).save_pretrained(folder / kind)
    Qwen2VLPictures().tokenizer.save_pretrained(folder / kind)
    return folder / kind


def prompts_of(kind: str) -> list[dict[str, Any]]:
    """Returns prompts with no, one and two pictures; a step has some of several."""
    mark = PLACEHOLDERS[kind]
    texts = [
        (f"what is {mark} this", [picture(0)]),
        (f"what is {mark} this", [picture(1, 60, 31)]),
        (f"{mark} {'cat dog ' * 20} {mark} what", [picture(2), picture(1)]),
    ]
    prompts: list[dict[str, Any]] = [{"prompt": t, "multi_modal_data": {"image": p}} for t, p in texts]
    return [*prompts, {"prompt": "what is this"}]


def distinct(outputs: list[Any]) -> int:
    return len({repr(output.outputs[0].logprobs) for output in outputs})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("gemma3", "tensor_parallel_size"),
        pytest.param("qwen2_vl", "pipeline_parallel_size", marks=pytest.mark.thorough),
        pytest.param("qwen3_vl", "tensor_parallel_size", marks=pytest.mark.thorough),
    ],
)
def test_ranks_and_stages_answer_as_one_process(
    kind: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that see later ones, M-RoPE, and features that layers add."""
    folder, prompts = saved(tmp_path, kind), prompts_of(kind)
    one = load(folder, monkeypatch, tensor_parallel_size=1)
    expected = one.generate(prompts, DRAWN, use_tqdm=False)
    assert distinct(expected) == len(prompts)
    del one
    two = load(folder, monkeypatch, **{setting: 2})
    divided = "gather_columns" in two.llm_engine.runner.plan.opcodes  # type: ignore[union-attr]
    assert divided == setting.startswith("tensor")
    for _ in range(2):
        outputs = two.generate(prompts, DRAWN, use_tqdm=False)
        for found, wanted in zip(outputs, expected, strict=True):
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert outputs[2].num_cached_tokens > 0
    if kind == "gemma3":
        check_bad_pictures(two, prompts[0])


def check_bad_pictures(llm: LLM, good: dict[str, Any]) -> None:
    """Checks that bad pictures are refused, and that nothing is lost."""
    before = llm.generate(good, DRAWN, use_tqdm=False)[0].outputs[0].token_ids
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\nno picture").decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(ValueError, match="image"):
        llm.chat([{"role": "user", "content": parts}], DRAWN, use_tqdm=False)
    for text, pictures in (("<start_of_image> " * 3, [picture(0)] * 3), ("what", [picture(0)])):
        with pytest.raises(ValueError, match="allows 2|refuses"):
            llm.generate({"prompt": text, "multi_modal_data": {"image": pictures}}, DRAWN, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate(good, DRAWN, use_tqdm=False)[0].outputs[0].token_ids == before
