"""Tokens of pictures with a time, a row and a column (M-RoPE): Qwen's models, without their processor."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import torch_armllm  # noqa: E402
from tests.support.draft_engines import accepted  # noqa: E402
from tests.support.picture_folders import Qwen2VLPictures, picture, qwen_model  # noqa: E402
from torch_armllm import Recipe, SamplingParams  # noqa: E402
from torch_armllm.checkpoint.load import load_model  # noqa: E402
from torch_armllm.engine.build import build_engine  # noqa: E402
from torch_armllm.engine.config import EngineConfig  # noqa: E402
from torch_armllm.engine.images.image_rows import PictureRows  # noqa: E402
from torch_armllm.engine.images.rotary_axes import rotary_axes  # noqa: E402
from torch_armllm.engine.llm_engine import LLMEngine  # noqa: E402
from torch_armllm.engine.text.preprocess import NewRequest  # noqa: E402
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config  # noqa: E402
from torch_armllm.model_survey.tiny_processors import model_kind  # noqa: E402
from torch_armllm.patching.state import patched_forward  # noqa: E402
from torch_armllm.plan.native import native_plan  # noqa: E402

MARK = "<|image_pad|>"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl", "qwen3_5"])
def own(request: pytest.FixtureRequest) -> Any:
    return qwen_model(request.param)


@pytest.fixture(scope="module")
def patched(own: Any) -> Any:
    model = copy.deepcopy(own)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    return model


def expected(model: Any, prompt: dict[str, Any]) -> list[int]:
    """Returns the most probable tokens by whole forwards of a model."""
    processor = Qwen2VLPictures()
    pictures = prompt.get("multi_modal_data", {}).get("image")
    if pictures:
        inputs = processor([prompt["prompt"]], [pictures], "pt")
    else:
        inputs = {"input_ids": processor.tokenizer(prompt["prompt"], return_tensors="pt")["input_ids"]}
    found: list[int] = []
    for _ in range(GREEDY.max_tokens or 0):
        with torch.no_grad():
            token = model(**inputs, use_cache=False).logits[0, -1].argmax()
        found.append(int(token))
        inputs["input_ids"] = torch.cat([inputs["input_ids"], token[None, None]], 1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 1))
    return found


def answers(engine: LLMEngine, prompts: list[dict[str, Any]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add_request(NewRequest(str(number), prompt, GREEDY))
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    return [found[str(number)] for number in range(len(prompts))]


def engine_of(model: Any, **settings: Any) -> LLMEngine:
    processor = Qwen2VLPictures()
    config = EngineConfig(kv_cache_memory=4 << 20, **settings)
    return build_engine(model, processor.tokenizer, config, processor)


@pytest.mark.parametrize("tokens", [7, 512])
def test_answers_are_those_of_the_model(own: Any, patched: Any, tokens: int) -> None:
    texts = [
        (f"what is {MARK} this", [picture(0)]),
        (f"{MARK} cat", [picture(1, 60, 31)]),
        (f"{MARK} what {MARK}", [picture(0), picture(2, 20, 80)]),
        (f"{MARK} {'cat dog ' * 20} {MARK} what", [picture(2), picture(1)]),
    ]
    prompts: list[dict[str, Any]] = [{"prompt": t, "multi_modal_data": {"image": p}} for t, p in texts]
    prompts.append({"prompt": "what is this"})
    wanted = [expected(own, prompt) for prompt in prompts]
    engine = engine_of(patched, max_num_batched_tokens=tokens, max_num_seqs=5)
    for _ in range(2):
        assert answers(engine, prompts) == wanted


def test_pictures_of_one_color_differ_in_their_shape(own: Any, patched: Any) -> None:
    """Their embeddings are equal, and their positions are not."""
    shapes = ((32, 8), (16, 16))
    prompts = [
        {
            "prompt": f"{MARK} a " * 12 + "what",
            "multi_modal_data": {"image": [Image.new("RGB", shape, "red")] * 12},
        }
        for shape in shapes
    ]
    engine = engine_of(patched, limit_mm_per_prompt={"image": 12})
    for number in (0, 1, 0, 1):
        assert answers(engine, [prompts[number]]) == [expected(own, prompts[number])]


def test_keys_of_the_prefix_cache_hold_all_that_a_token_is_computed_from() -> None:
    rows = torch.ones(3, 4)
    square, line = (
        PictureRows([1, 2, 3], rows, torch.tensor([[0, 0, 0], [1, 1, 1], [1, *second], [2, 2, 2]]))
        for second in ((1, 2), (2, 1))
    )
    assert square.keys[0] == line.keys[0] and square.keys[1] != line.keys[1]
    other = torch.cat([rows[:2], 2 * rows[:1]])
    before, after = (PictureRows([1, 2, 3], each, spans=[(2, 4)]) for each in (rows, other))
    assert before.keys[0] == after.keys[0] and len({*before.keys, *after.keys}) == 5


def test_drafts_continue_at_the_position_after_a_picture(own: Any, patched: Any) -> None:
    prompt = {
        "prompt": f"{MARK} {'cat dog red ' * 10} cat",
        "multi_modal_data": {"image": [picture(3)]},
    }
    settings = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert answers(engine_of(patched, **settings), [prompt]) == [expected(own, prompt)]


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("equal", [True, False])
@torch.no_grad()
def test_positions_that_differ_run_by_modules(own: Any, patched: Any, rows: int, equal: bool) -> None:
    ids = torch.randint(20, 60, (1, 9))
    places: Tensor = torch.arange(9)
    positions = torch.stack([places if equal else places // (row + 1) for row in range(rows)])[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = patched(input_ids=ids, position_ids=positions, use_cache=False).logits
    wanted = own(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert not (equal and caught)


def test_layers_that_draft_are_those_of_the_language_model(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 hold a layer for multi-token prediction beside those of texts and pictures."""
    model = qwen_model("qwen3_5")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = "model.language_model.layers.3."
    added = {f"mtp.layers.0.{n.removeprefix(last)}": t.clone() for n, t in tensors.items() if last in n}
    for name, sizes in (("pre_fc_norm_embedding", (64,)), ("pre_fc_norm_hidden", (64,)), ("norm", (64,))):
        added[f"mtp.{name}.weight"] = torch.full(sizes, 0.1)
    added["mtp.fc.weight"] = torch.eye(64, 128)
    save_file(tensors | added, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert torch_armllm.patch(loaded, None, progress=False).captured
    engine = engine_of(loaded, speculative_config={"method": "mtp"})
    prompt = {"prompt": f"{MARK} {'cat dog red ' * 10} cat", "multi_modal_data": {"image": [picture(3)]}}
    assert answers(engine, [prompt]) == [expected(model, prompt)]
    drafted, _ = accepted(engine)
    assert drafted > 0


def test_frequencies_that_a_plan_joins_behind_its_table_have_their_own_axes() -> None:
    """Rows and columns take turns in ERNIE's angles, and follow each other in its frequencies."""
    model = build_tiny(model_kind(), tiny_config("ernie4_5_vl_moe"))
    torch_armllm.patch(model, Recipe(importance=False), progress=False)
    forward = patched_forward(model)
    plan = native_plan(forward.plan) if forward is not None else None
    assert plan is not None
    rows, columns, times = model.config.get_text_config().rope_parameters["mrope_section"]
    axes = rotary_axes(model.model.language_model, plan.program, 3)
    assert axes.tolist() == [1] * rows + [2] * columns + [0] * times
