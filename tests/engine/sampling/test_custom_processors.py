"""Logit processors of users: what their functions get, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.sampling.test_sampler import VOCAB, Words, ids, sampler, sequence, some_logits
from torch_armllm import AdapterLogitsProcessor, SamplingParams
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling.custom_processors import load_processors
from torch_armllm.engine.sampling.sampler import Sampler


class Only(AdapterLogitsProcessor):
    """Allows the token of ``extra_args["only"]`` after as many others."""

    invariant = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("only", 0), int):
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None

        def after(output: list[int], logits: Tensor) -> Tensor:
            changed = torch.full_like(logits, float("-inf"))
            changed[only + len(output)] = 0.0
            return changed

        return after


class Invariant(Only):
    """The same, but greedy requests do not get it."""

    invariant = True


class Prompted(Only):
    """Allows the prompt's first token plus that of the output's last, in place."""

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        def after(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            best = prompt[0] + (output[-1] if output else 0)
            logits[:best] = float("-inf")
            logits[best + 1 :] = float("-inf")
            return logits

        return after


class Broken(Only):
    """Returns a wrong shape."""

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        return lambda output, logits: logits[:3]


def made_sampler(*classes: str | type[Any]) -> Sampler:
    return Sampler(VOCAB, (2,), Words(), None, load_processors(classes, EngineConfig()))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_functions_change_the_rows_of_their_requests(temperature: float) -> None:
    draw, logits = made_sampler(f"{Only.__module__}:Only"), some_logits(2)
    chosen = sequence(output=(9,), extra_args={"only": 30}, temperature=temperature)
    other = sequence(temperature=temperature, seed=3)
    drawn = ids(draw(logits.clone(), [chosen, other]))
    assert drawn == [31, ids(sampler()(logits[1:].clone(), [other]))[0]]


def test_functions_see_draft_tokens_and_the_prompt() -> None:
    draw = made_sampler(Prompted)
    made = sequence(prompt=(4, 9), output=(6,), temperature=0.0)
    made.draft = [10, 14, 5]
    assert ids(draw.verify(some_logits(4), made)) == [10, 14, 18]


def test_greedy_requests_leave_invariant_processors_out() -> None:
    draw, logits = made_sampler(Invariant), some_logits(1)
    greedy = sequence(extra_args={"only": 30}, temperature=0.0)
    assert ids(draw(logits.clone(), [greedy])) == logits.argmax(-1).tolist()
    assert ids(draw(logits.clone(), [sequence(extra_args={"only": 30})])) == [30]


def test_requests_are_checked() -> None:
    draw = made_sampler(Only)
    draw.check(SamplingParams(extra_args={"only": 3}))
    with pytest.raises(ValueError, match="^only must be a token id$"):
        draw.check(SamplingParams(extra_args={"only": "x"}))
    with pytest.raises(ValueError) as refused:
        sampler().check(SamplingParams(extra_args={"only": 3, "a": 1}))
    assert str(refused.value) == (
        "extra_args sets a, only, and no logits_processors of this engine read it: leave it out, or give the "
        "engine logits_processors"
    )
    with pytest.raises(ValueError, match=r"^extra_args must be a dict with names, but it is \[3\]$"):
        SamplingParams(extra_args=[3])  # type: ignore[arg-type]


def test_a_wrong_result_is_an_error() -> None:
    told = r"^the logits processor Broken returned a tensor \(3,\); return logits \(50,\)$"
    with pytest.raises(ValueError, match=told):
        made_sampler(Broken)(some_logits(1), [sequence()])


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (
            int,
            ValueError,
            "logits_processors holds int, which is no class with new_req_logits_processor, or with apply and "
            "update_state; give a subclass of torch_armllm.AdapterLogitsProcessor or LogitsProcessor",
        ),
        ("json", ValueError, "logits_processors holds 'json'; give a class, or 'module:Class'"),
        ("nowhere:A", ModuleNotFoundError, "No module named 'nowhere'"),
        (
            "json:A",
            ValueError,
            "logits_processors holds json:A, which is no class with new_req_logits_processor, or with apply "
            "and update_state; give a subclass of torch_armllm.AdapterLogitsProcessor or LogitsProcessor",
        ),
    ],
    ids=["no processor", "no class", "no module", "no attribute"],
)
def test_other_shapes_are_refused(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(told)}$"):
        load_processors([given], EngineConfig())


def test_processors_are_a_list() -> None:
    with pytest.raises(TypeError) as refused:
        EngineConfig(logits_processors="a:B")
    assert str(refused.value) == "logits_processors = 'a:B': give a list of classes, or of 'module:Class'"
