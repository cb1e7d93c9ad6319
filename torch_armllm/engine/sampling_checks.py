"""What a request's settings may be; everything that is wrong is told when it is submitted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_armllm.engine.sampling_params import SamplingParams, StructuredOutputsParams


def _number(name: str, value: Any, low: float, high: float, remedy: str, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, but it is {value!r}; {remedy}")
    if value < low or value > high or (above and value == low):
        raise ValueError(f"{name} is {value}; {remedy}")


def _whole(name: str, value: Any, least: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, but it is {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{name} is {value}; {remedy}")


def _texts(name: str, values: Iterable[Any]) -> None:
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} holds {text!r}; give texts of at least one character")


def _ids(name: str, values: Iterable[Any], most: int | None = None) -> None:
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} holds {token!r}; token ids are whole numbers from 0 on")
        if most is not None and token > most:
            raise ValueError(f"{name} holds token {token}, but the model's ids end at {most}")


def _check_lengths(params: SamplingParams) -> None:
    _whole("n", params.n, 1, "ask for at least one answer")
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, 1, "allow at least one token, or None for no limit")
    _whole("min_tokens", params.min_tokens, 0, "give 0 or more")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, which is more than max_tokens = {params.max_tokens}; "
            "raise max_tokens"
        )


def _check_filters(params: SamplingParams) -> None:
    most = 3e38  # of float32, in which all of these are computed
    _number("temperature", params.temperature, 0, most, "give 0 (the most probable token) or more")
    _number("top_p", params.top_p, 0, 1, "give a number above 0 and at most 1 (all tokens)", above=True)
    _whole("top_k", params.top_k, -1, "give how many tokens may be drawn, 0 or -1 for all")
    _number("min_p", params.min_p, 0, 1, "give a part of the best token's probability, 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        _number(name, getattr(params, name), -2, 2, "give a number from -2 to 2")
    positive = "give a number above 0; 1 changes nothing"
    _number("repetition_penalty", params.repetition_penalty, 0, 1e30, positive, above=True)
    if params.repetition_penalty < 1e-30:
        raise ValueError(f"repetition_penalty is {params.repetition_penalty}; give at least 1e-30")
    if params.best_of is not None:
        _whole("best_of", params.best_of, params.n, f"write at least n = {params.n} answers to choose from")
    if params.width > 1 and params.temperature < 1e-5:
        name = "best_of" if params.chooses else "n"
        raise ValueError(
            f"{name} is {params.width}, but temperature {params.temperature} makes all answers the same; "
            "raise the temperature or ask for one answer"
        )
    if params.seed is not None and (isinstance(params.seed, bool) or not isinstance(params.seed, int)):
        raise ValueError(f"seed must be a whole number or None, but it is {params.seed!r}")


def _check_tokens(params: SamplingParams) -> None:
    if params.stop is not None and not isinstance(params.stop, (str, list, tuple)):
        raise ValueError(f"stop must be a text or a list of texts, but it is {params.stop!r}")
    _texts("stop", [params.stop] if isinstance(params.stop, str) else params.stop or ())
    if params.stop and not params.detokenize:
        raise ValueError("stop texts need text: leave detokenize on, or use stop_token_ids")
    if isinstance(params.bad_words, str):
        raise ValueError(f"bad_words must be a list of texts, but it is {params.bad_words!r}")
    _texts("bad_words", params.bad_words or ())
    _ids("stop_token_ids", params.stop_token_ids or ())
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty; None allows all tokens")
        _ids("allowed_token_ids", params.allowed_token_ids)
    _ids("logit_bias", params.logit_bias or ())
    for token, bias in (params.logit_bias or {}).items():
        _number(f"the bias of token {token}", bias, -100, 100, "give a number from -100 to 100")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            remedy = "give how many tokens' log-probabilities are wanted, -1 for all, or None"
            _whole(name, getattr(params, name), -1, remedy)


def check(params: SamplingParams) -> None:
    """Raises ValueError where a setting is out of its range or contradicts another."""
    _check_lengths(params)
    _check_filters(params)
    _check_tokens(params)


def check_for(params: SamplingParams, vocab_size: int, prompt_token_ids: Sequence[int] = ()) -> None:
    """Raises ValueError where a token id is none of the model's, or more are asked for than there are."""
    last = vocab_size - 1
    if prompt_token_ids and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) <= last:
        _ids("the prompt", prompt_token_ids, last)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _ids(name, getattr(params, name) or (), last)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab_size:
            raise ValueError(f"{name} is {wanted}, but the model has {vocab_size} tokens; -1 gives all")


def check_structured(params: StructuredOutputsParams) -> None:
    """Raises ValueError unless exactly one form is asked for, and it says something."""
    forms = ("json", "regex", "choice", "grammar", "json_object")
    given = [name for name in forms if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        raise ValueError(
            f"structured outputs need exactly one of {', '.join(forms)}; given: {', '.join(given) or 'none'}"
        )
    for name in ("regex", "grammar"):
        text = getattr(params, name)
        if text is not None and (not isinstance(text, str) or not text):
            raise ValueError(f"structured outputs: {name} is {text!r}; give a text")
    if params.choice is not None:
        if isinstance(params.choice, str) or not params.choice:
            raise ValueError(f"structured outputs: choice is {params.choice!r}; give a list of texts")
        _texts("choice", params.choice)
    if params.json is not None and not isinstance(params.json, (str, dict)):
        raise ValueError(f"structured outputs: json is {params.json!r}; give a schema as a text or a dict")
