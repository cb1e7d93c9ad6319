"""``generate`` of a patched model by plan steps: tokens, scores, streams and caches of transformers' loop."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import torch_armllm
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.patching import patch
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.generation.decode_steps import DecodeSteps
from torch_armllm.patching.generation.generate import PatchedGenerate

FAMILIES = ["llama", "mistral", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next", "gemma3_text"]
Counts = list[int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Numbers of rows of the steps that ran on a plan, without those of the trial after `patch`."""
    seen: Counts = []
    run, trial = DecodeSteps.decode, patch.fault_of

    def counted(self: DecodeSteps, token_ids: Any) -> Any:
        seen.append(len(token_ids))
        return run(self, token_ids)

    def tried(*args: Any) -> Any:
        fault = trial(*args)
        seen.clear()
        return fault

    monkeypatch.setattr(DecodeSteps, "decode", counted)
    monkeypatch.setattr(patch, "fault_of", tried)
    return seen


def patched(family: str = "llama", **changes: Any) -> Any:
    model = tiny(family, **changes)
    report = torch_armllm.patch(model, progress=False)
    assert report.captured, report.capture_reason
    return model


shared = functools.cache(patched)
"""Returns a patched model of the tests that do not change it."""


def both(model: Any, *args: Any, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    """Returns the results of the patched ``generate`` and of transformers' own."""
    torch.manual_seed(seed)
    ours = model.generate(*args, **settings)
    torch.manual_seed(seed)
    return ours, type(model).generate(model, *args, **settings)


def left_padded(count: int, length: int) -> tuple[Tensor, Tensor]:
    ids, mask = token_ids(count, length), torch.ones(count, length, dtype=torch.int64)
    for row in range(count):
        ids[row, :row], mask[row, :row] = 0, 0
    return ids, mask


class Record:
    """A streamer that keeps what it receives."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


class After(StoppingCriteria):  # type: ignore[misc]
    """Stops each row after another length."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([input_ids.shape[1] > 9 + 2 * row for row in range(input_ids.shape[0])])


class Odd(LogitsProcessor):  # type: ignore[misc]
    """Forbids even tokens after even ones."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.is_contiguous() and scores.dtype == torch.float32
        scores[input_ids[:, -1] % 2 == 0, ::2] = -torch.inf
        return scores


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens(family: str, rows: int, steps: Counts) -> None:
    model = shared(family)
    ids, mask = left_padded(rows, 8)
    ours, expected = both(
        model, ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert torch.equal(ours, expected) and ours.shape == (rows, 48)
    assert steps == [rows] * 39


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12, "eos_token_id": [5, 6, 7]},
        {"bad_words_ids": [[3], [4, 5]], "no_repeat_ngram_size": 2},
        {"logits_processor": [Odd()]},
        {"stopping_criteria": [After()]},
        {"stopping_criteria": [After()], "eos_token_id": None},
        {"max_time": 60.0},
        {"max_length": 15},
        {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=True, top_k=5, pad_token_id=0)},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("rows", [1, 2])
def test_settings(settings: dict[str, Any], rows: int, steps: Counts) -> None:
    ids, mask = left_padded(rows, 8)
    if not {"max_length", "generation_config"} & settings.keys():
        settings = {"max_new_tokens": 20, "do_sample": False, **settings}
    ours, expected = both(shared(), ids, attention_mask=mask, **settings)
    assert torch.equal(ours, expected)
    assert steps


def test_rows_end_by_themselves_and_are_padded(steps: Counts) -> None:
    model, ids = shared(), token_ids(4, 6)
    free = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)[:, 6:]
    ends = [int(free[0, 4]), int(free[1, 9])]
    steps.clear()
    ours, expected = both(model, ids, max_new_tokens=30, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(ours, expected)
    assert (ours[:, -1] == 0).any() or ours.shape[1] < 36
    assert len(steps) == ours.shape[1] - 7


@pytest.mark.parametrize("sample", [False, True])
def test_scores_logits_and_cache(sample: bool) -> None:
    model, (ids, mask) = shared("gpt2"), left_padded(2, 7)
    settings = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    ours, expected = both(
        model, ids, attention_mask=mask, max_new_tokens=6, do_sample=sample, temperature=0.5, **settings
    )
    assert type(ours) is type(expected) and ours.keys() == expected.keys()
    assert torch.equal(ours.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(expected[name]) == 6
        assert all(torch.equal(a, b) for a, b in zip(ours[name], expected[name], strict=True))
    assert isinstance(ours.past_key_values, PagedCache)
    assert ours.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_cache_is_kept_over_turns(family: str, steps: Counts) -> None:
    model, ids = shared(family), token_ids(1, 6)
    texts = []
    for generate in (model.generate, lambda *a, **k: type(model).generate(model, *a, **k)):
        text, cache = ids, None
        for turn in range(3):
            result = generate(
                text,
                past_key_values=cache,
                max_new_tokens=5,
                do_sample=False,
                return_dict_in_generate=True,
            )
            cache = result.past_key_values
            text = torch.cat([result.sequences, token_ids(1, 3 + turn)], 1)
        with torch.no_grad():  # a step by hand goes on from the same cache
            logits = model(text[:, cache.get_seq_length() :], past_key_values=cache).logits
        texts.append((text, logits))
    (ours, ours_logits), (expected, expected_logits) = texts
    assert torch.equal(ours, expected) and torch.equal(ours_logits, expected_logits)
    assert len(steps) == 12


def test_streamer() -> None:
    model, ids, seen = shared(), token_ids(1, 5), []
    for generate in (model.generate, lambda *a, **k: type(model).generate(model, *a, **k)):
        streamer = Record()
        generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
        seen.append(streamer.seen)
    assert seen[0] == seen[1] and len(seen[0]) == 8


def test_blocks_are_added_and_pools_grow(steps: Counts) -> None:
    model, ids = patched(max_position_embeddings=4096), token_ids(2, 3)
    ours, expected = both(model, ids, max_new_tokens=1200, do_sample=False, eos_token_id=None)
    assert torch.equal(ours, expected) and len(steps) == 1199


def test_past_the_positions_of_a_model() -> None:
    model, ids = patched(max_position_embeddings=16), token_ids(1, 10)
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)


@pytest.mark.filterwarnings("ignore:torch_armllm. the plan supports at most")
@pytest.mark.parametrize("ended", [False, True])
def test_past_the_tokens_of_a_plan(ended: bool, steps: Counts) -> None:
    model, (ids, mask) = patched(), left_padded(3, 8)
    model.model.forward.calls.max_length = 14
    settings = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 20}
    settings |= {"do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    free, _ = both(model, ids, eos_token_id=None, **settings)
    end = int(free.sequences[1, 10]) if ended else None
    steps.clear()
    ours, expected = both(model, ids, eos_token_id=end, **settings)
    assert torch.equal(ours.sequences, expected.sequences)
    assert len(ours.scores) == len(expected.scores) == ours.sequences.shape[1] - 8
    assert len(steps) == 6
    settings |= {"stopping_criteria": [After()]}  # rows that ended go on, as no token ends them
    ours, expected = both(model, ids, eos_token_id=None, **settings)
    assert torch.equal(ours.sequences, expected.sequences)


@pytest.mark.filterwarnings("ignore:torch_armllm. ")
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_other_calls_keep_transformers_loop(settings: dict[str, Any], steps: Counts) -> None:
    ours, expected = both(shared(), token_ids(1, 9), max_new_tokens=6, do_sample=False, **settings)
    if not isinstance(ours, Tensor):
        ours, expected = ours.sequences, expected.sequences
    assert torch.equal(ours, expected) and not steps


def test_padding_on_the_right_keeps_transformers_loop(steps: Counts) -> None:
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    ids[0, 7:], mask[0, 7:] = 0, 0
    ours, expected = both(shared(), ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, expected) and not steps


def test_float_and_replaced_heads_keep_transformers_loop(steps: Counts) -> None:
    model = tiny("llama")
    torch_armllm.patch(model, Recipe(head=None), progress=False)
    both(model, token_ids(1, 4), max_new_tokens=4, do_sample=False)
    model = patched()
    model.set_output_embeddings(torch.nn.Linear(64, 97))
    ours, expected = both(model, token_ids(1, 4), max_new_tokens=4, do_sample=False)
    assert torch.equal(ours, expected) and not steps


def test_unpatch_restores_generate() -> None:
    model = patched()
    assert isinstance(model.generate, PatchedGenerate)
    assert model.generate.__doc__ == type(model).generate.__doc__
    torch_armllm.unpatch(model)
    assert "generate" not in model.__dict__
