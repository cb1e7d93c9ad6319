"""Masks that hide other tokens than those before a text, and texts in one row: as modules compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

import torch_armllm
from tests.support.models import tiny, token_ids

LENGTH = 30
IDS = token_ids(2, LENGTH)
MASKS = {
    "right": [[1] * 30, [1] * 20 + [0] * 10],
    "one": [[1] * 30, [1] * 29 + [0]],
    "hole": [[1] * 10 + [0] * 4 + [1] * 16, [0] * 2 + [1] * 28],
    "both sides": [[0] * 3 + [1] * 27, [0] * 2 + [1] * 18 + [0] * 10],
    "no tokens": [[1] * 30, [0] * 30],
}
FAMILIES = ["llama", "gemma3_text", "gpt2", "qwen3_next", "qwen3_moe"]
"""Of these, Gemma has a window shorter than the prompt, and Qwen3-Next recurrent layers."""

pytestmark = pytest.mark.filterwarnings("ignore:torch_armllm")


@pytest.fixture(scope="module", params=FAMILIES)
def twins(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A patched model, and the same one as it is."""
    model = tiny(request.param)
    torch_armllm.patch(model, None, progress=False)
    return model, tiny(request.param)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_logits_of_tokens_and_of_the_last_column(
    twins: tuple[Any, Any], name: str, kind: torch.dtype
) -> None:
    mask = torch.tensor(MASKS[name]).to(kind)
    read = mask != 0
    read[:, -1] = True
    got, expected = (model(IDS, attention_mask=mask).logits[read] for model in twins)
    close(got, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True},
        {"num_return_sequences": 2, "num_beams": 2, "do_sample": True},
    ],
    ids=lambda settings: "+".join(settings) or "greedy",
)
@pytest.mark.parametrize("name", MASKS)
def test_generate(twins: tuple[Any, Any], name: str, settings: dict[str, Any]) -> None:
    arguments = {"attention_mask": torch.tensor(MASKS[name]), "max_new_tokens": 4, "pad_token_id": 0}
    found = []
    for model in twins:
        torch.manual_seed(1)
        found.append(model.generate(IDS, **arguments, **{"do_sample": False, **settings}))
    assert torch.equal(*found)


def test_prompt_lookup(twins: tuple[Any, Any]) -> None:
    model, own = twins
    if own._is_stateful:
        pytest.skip("transformers has no assisted generation for recurrent layers")
    mask = torch.tensor(MASKS["right"])[1:]
    settings = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    got, expected = (m.generate(IDS[1:], prompt_lookup_num_tokens=3, **settings) for m in (model, own))
    assert torch.equal(got, expected)


@torch.no_grad()
def test_steps_after_right_padding(twins: tuple[Any, Any]) -> None:
    """A loop as users write it; the cache then goes on by modules and is cropped."""
    mask = torch.tensor(MASKS["right"])
    results = []
    for model in twins:
        out = model(IDS, attention_mask=mask, use_cache=True)
        parts, grown = [out.logits[:, -1]], mask
        for step in range(3):
            grown = torch.nn.functional.pad(grown, (0, 1), value=1)
            out = model(
                IDS[:, step : step + 1],
                attention_mask=grown,
                past_key_values=out.past_key_values,
                output_hidden_states=step == 1,
            )
            parts.append(out.logits[:, -1])
        cache = out.past_key_values
        if cache.is_croppable and getattr(model.config, "sliding_window", None) is None:
            cache.crop(-2)
            out = model(IDS[:, :2], attention_mask=grown, past_key_values=cache)
            parts.append(out.logits[:, -1])
        results.append(torch.stack(parts))
    close(*results)


@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_packed_texts(twins: tuple[Any, Any], use_cache: bool) -> None:
    texts = [{"input_ids": IDS[0, :12].tolist()}, {"input_ids": IDS[0, 12:].tolist()}]
    is_recurrent = "Next" in type(twins[0]).__name__
    kinds = [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}]
    for names in kinds[: 1 if is_recurrent else 2]:  # its modules refuse the others without further packages
        batch = DataCollatorWithFlattening(return_tensors="pt", **names)(texts)
        batch.pop("labels")
        got, expected = (model(**batch, use_cache=use_cache).logits for model in twins)
        close(got, expected)
    if not use_cache and not is_recurrent:
        close(got[:, 12:], twins[0](IDS[:1, 12:], use_cache=False).logits)


@torch.no_grad()
def test_packed_positions_are_named() -> None:
    model = tiny("llama")
    torch_armllm.patch(model, None, progress=False)
    positions = (torch.arange(LENGTH) % 10)[None]
    with pytest.warns(UserWarning, match="several texts in a row"):
        model(IDS[:1], position_ids=positions, use_cache=False)
    own = tiny("llama")
    for arguments in (
        {"attention_mask": torch.ones(1, LENGTH)},
        {"past_key_values": None, "use_cache": True},
    ):
        got, expected = (m(IDS[:1], position_ids=positions, **arguments).logits for m in (model, own))
        close(got, expected)


def test_right_padding_that_a_plan_cannot_leave_out_is_named() -> None:
    model = tiny("mistral")
    torch_armllm.patch(model, None, progress=False)
    with pytest.warns(UserWarning, match="hides tokens after others .pad on the left."):
        model(IDS, attention_mask=torch.tensor(MASKS["right"]))


@pytest.mark.parametrize("shape", [(2, 1, LENGTH, LENGTH), (2, LENGTH, LENGTH)])
@torch.no_grad()
def test_masks_of_pairs_of_tokens(shape: tuple[int, ...]) -> None:
    model, own = tiny("llama"), tiny("llama")
    torch_armllm.patch(model, None, progress=False)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(shape)
    if len(shape) == 4:
        close(*(m(IDS, attention_mask=mask).logits for m in (model, own)))
    else:
        with (
            pytest.warns(UserWarning, match="3 dimensions"),
            pytest.raises((ValueError, RuntimeError, IndexError)),
        ):
            model(IDS, attention_mask=mask)
