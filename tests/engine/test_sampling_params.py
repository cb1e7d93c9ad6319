"""Validation of sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_armllm.engine.sampling_params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 2, "temperature": 0.0}, "makes all completions the same"),
        ({"n": True}, "whole number"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "finite"),
        ({"temperature": math.nan}, "finite"),
        ({"temperature": "hot"}, "'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "whole number"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop holds ''"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": 3}, "stop must be"),
        ({"stop": "a", "detokenize": False}, "detokenize"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"stop_token_ids": ["a"]}, "'a'"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": "word"}, "list of texts"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 17}, "more than max_tokens = 16"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"logit_bias": {3: 101.0}}, "bias of token 3"),
        ({"logit_bias": {3: math.nan}}, "bias of token 3"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1"),
        ({"allowed_token_ids": []}, "empty"),
        ({"allowed_token_ids": [-4]}, "-4"),
    ],
)
def test_invalid_params_are_rejected(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingParams(**settings)


def test_limits_of_ranges_are_accepted() -> None:
    SamplingParams(top_k=-1, top_p=1.0, min_p=1.0, temperature=0.0, logprobs=-1, prompt_logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, max_tokens=None, min_tokens=100, seed=-(2**70))
    SamplingParams(n=3, max_tokens=5, min_tokens=5, logit_bias={0: -100, 5: 100.0}, top_k=10**9)
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "prompt", "told"),
    [
        ({"logit_bias": {97: 1.0}}, [1], "logit_bias holds token 97.*end at 96"),
        ({"allowed_token_ids": [3, 97]}, [1], "allowed_token_ids holds token 97"),
        ({"stop_token_ids": [1000]}, [1], "stop_token_ids holds token 1000"),
        ({}, [5, 97], "prompt holds token 97"),
        ({}, [5, -1], "prompt holds -1"),
        ({"logprobs": 98}, [1], "logprobs is 98"),
        ({"prompt_logprobs": 98}, [1], "prompt_logprobs is 98"),
    ],
)
def test_values_beyond_the_model_are_rejected(settings: dict[str, Any], prompt: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingParams(**settings).check_against_model(97, prompt)


def test_values_within_the_model_are_accepted() -> None:
    settings = {"logit_bias": {96: 1.0}, "allowed_token_ids": [0, 96], "logprobs": 97}
    SamplingParams(**settings).check_against_model(97, [0, 96])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "exactly one.*none"),
        ({"json_object": False}, "exactly one"),
        ({"json": "{}", "regex": "a"}, "json, regex"),
        ({"choice": []}, "choice is"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": ["yes", ""]}, "choice holds ''"),
        ({"regex": ""}, "regex is ''"),
        ({"json": 3}, "json is 3"),
    ],
)
def test_invalid_structured_outputs_are_rejected(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StructuredOutputsParams(**settings)
