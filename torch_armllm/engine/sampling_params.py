"""How a request wants its tokens drawn, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    """What a request's outputs hold."""

    CUMULATIVE = 0
    """Everything so far, after every step."""
    DELTA = 1
    """What is new, after every step."""
    FINAL_ONLY = 2
    """Everything, once, when the request has come to its end."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What every answer must match; exactly one of these is given.

    Attributes:
        json: a JSON schema, as text or as the object that it describes.
        regex: a regular expression of the whole answer.
        choice: the texts that are allowed.
        grammar: a context-free grammar in Lark's syntax.
        json_object: any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        _check_structured(self)


@dataclass
class SamplingParams:
    """Settings of a request; names, meaning and defaults are vLLM's.

    Attributes:
        n: answers to each prompt; the prompt is read once.
        presence_penalty: subtracted from the logits of tokens that the answer has, −2 … 2.
        frequency_penalty: subtracted once for each time that the answer has the token, −2 … 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and answer.
        temperature: 0 takes the most probable token.
        top_p: only the fewest best tokens whose probabilities reach this together, above 0 … 1.
        top_k: only so many best tokens; 0 or −1: all.
        min_p: only tokens that have at least this part of the best one's probability, 0 … 1.
        seed: makes the draws reproducible, whatever else runs.
        stop: texts that end an answer, and are cut off from it.
        stop_token_ids: tokens that end an answer, beside the model's own end token.
        bad_words: texts that must not appear.
        include_stop_str_in_output: keeps the text that ended the answer.
        ignore_eos: goes on behind the model's end token.
        max_tokens: most tokens of an answer; None: as many as `max_model_len` allows.
        min_tokens: end tokens and stop texts do not count before so many tokens.
        logprobs: so many best tokens' log-probabilities at each place, besides the drawn one's; −1: all.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: whether tokens become text.
        skip_special_tokens: leaves special tokens out of the text.
        logit_bias: added to the logits of token ids, −100 … 100.
        allowed_token_ids: only these can be drawn.
        structured_outputs: what an answer must match.
        output_kind: what the engine's outputs hold.
        best_of: answers that are written, of which the `n` with the best sums of log-probabilities are given,
            the best first, once all have come to their end; None: as many as are given.

    Raises:
        ValueError: a setting is out of its range or contradicts another; the message has value and remedy.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    best_of: int | None = None

    stop_strings: tuple[str, ...] = field(init=False, repr=False)
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        _check(self)
        self.stop_strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """Answers that are written."""
        return self.n if self.best_of is None else self.best_of

    @property
    def selects_best(self) -> bool:
        """Whether more answers are written than given."""
        return self.num_sequences > self.n

    @property
    def logprobs_needed(self) -> int | None:
        """`logprobs`, or 0 where the drawn tokens' own tell which answers are the best."""
        return 0 if self.logprobs is None and self.selects_best else self.logprobs

    def check_against_model(self, vocab_size: int, prompt_token_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model: the token ids of the settings and of a prompt.

        Raises:
            ValueError: an id is not below ``vocab_size``, or more log-probabilities than that are wanted.
        """
        _check_against_model(self, vocab_size, prompt_token_ids)


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
    if params.num_sequences > 1 and params.temperature < 1e-5:
        name = "best_of" if params.selects_best else "n"
        raise ValueError(
            f"{name} is {params.num_sequences}, but temperature {params.temperature} makes all answers the "
            "same; raise the temperature or ask for one answer"
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


def _check(params: SamplingParams) -> None:
    """Raises ValueError where a setting is out of its range or contradicts another."""
    _check_lengths(params)
    _check_filters(params)
    _check_tokens(params)


def _check_against_model(
    params: SamplingParams, vocab_size: int, prompt_token_ids: Sequence[int] = ()
) -> None:
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


def _check_structured(params: StructuredOutputsParams) -> None:
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
