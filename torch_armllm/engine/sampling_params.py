"""Sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch_armllm.engine.structured.limits import check_size
from torch_armllm.system.foreign_arguments import refusing


class RequestOutputKind(Enum):
    """Contents of a request's outputs."""

    CUMULATIVE = 0
    """Everything so far, after every step."""
    DELTA = 1
    """New tokens and text, after every step."""
    FINAL_ONLY = 2
    """Everything, once, when the request has finished."""


class TextEnd(Protocol):
    """Finds where an output ends by what it says."""

    def begin(self) -> Callable[[str], int | None]:
        """Returns a function for one output.

        It takes each new piece of the text, and returns the number of characters up to the end; None before.
        """
        ...


class FreeReasoning(NamedTuple):
    """Reasoning before a structured output, which is free.

    Attributes:
        begin: text or special token before it, without which an output has none; None: the prompt has begun
            it.
        end: text or special token after it.
    """

    begin: str | None
    end: str


@refusing(
    {
        "disable_additional_properties": (False, 'write "additionalProperties": false into the schema'),
        "disable_any_whitespace": (False, "give whitespace_pattern"),
        "disable_fallback": (False, "there is one backend; leave it out"),
    }
)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Format that every output must match; exactly one format is set.

    Attributes:
        json: a JSON schema, as a string or a dict.
        regex: a regular expression that matches the whole output.
        choice: the allowed outputs.
        grammar: a context-free grammar in Lark's syntax, or in EBNF as llama.cpp reads it (GBNF): rules
            ``name ::= …``, of which ``root`` is the first.
        json_object: True: any JSON object.
        structural_tag: free text with calls in it and more, as JSON text or a dict in the shape of
            xgrammar's, ``{"type": "structural_tag", "format": {"type": …}}``, or the older one,
            ``{"triggers": ["<function="], "structures": [{"begin": "<function=f>", "schema": {…}, "end":
            "</function>"}]}``.  What follows a trigger has to be one of the structures that begin with it.
        whitespace_pattern: regular expression of the white space in JSON, which matches nothing else; None:
            any.
        reasoning: what may precede the output; None: nothing.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    reasoning: FreeReasoning | None = None

    def __post_init__(self) -> None:
        _check_structured(self)


@refusing(
    {
        "flat_logprobs": (False, "log-probabilities are dicts by token id; leave it out"),
        "guided_decoding": (None, "give structured_outputs"),
        "logits_processors": (None, "give the engine a class, which makes a function for each request"),
        "logprob_token_ids": (None, "logprobs=-1 returns those of all tokens"),
        "prompt_logprob_token_ids": (None, "prompt_logprobs=-1 returns those of all tokens"),
        "repetition_detection": (None, "give repetition_penalty or frequency_penalty"),
        "skip_reading_prefix_cache": (False, "cached prompts have the same outputs; leave it out"),
        "spaces_between_special_tokens": (True, "texts are the tokenizer's own; leave it out"),
        "stream_interval": (None, "streams have an output after every step; leave it out"),
        "trace_decode_token_ids": (False, "outputs have all token ids; leave it out"),
        "truncate_prompt_tokens": (None, "give the call tokenization_kwargs={'truncate_prompt_tokens': …}"),
        "watermarking": (None, "there are no watermarks; leave it out"),
    }
)
@dataclass
class SamplingParams:
    """Settings of a request; names, meaning and defaults are vLLM's.

    Attributes:
        n: completions per prompt; they share one prefill.
        presence_penalty: subtracted from the logits of tokens in the output, −2 … 2.
        frequency_penalty: subtracted once per occurrence of the token in the output, −2 … 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output.
        temperature: 0 is greedy.
        top_p: samples from the fewest most probable tokens whose probabilities sum up to this, above 0 … 1.
        top_k: samples from this many most probable tokens; 0 or −1: all.
        min_p: smallest probability relative to that of the most probable token, 0 … 1.
        seed: makes sampling reproducible, independent of other requests.
        stop: strings that stop the output and are cut off from it.
        stop_token_ids: tokens that stop the output, besides the model's EOS tokens.
        bad_words: strings that must not occur in the output.
        include_stop_str_in_output: keeps the stop string.
        ignore_eos: continues after the model's EOS token.
        max_tokens: most output tokens; None: as many as `max_model_len` allows.
        min_tokens: EOS tokens are forbidden and stop strings ignored before this many tokens.
        logprobs: number of best tokens whose log-probabilities are returned per position, besides the sampled
            token's; −1: all.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: False: no text, only tokens.
        skip_special_tokens: leaves special tokens out of the text.
        logit_bias: added to the logits, by token id, −100 … 100.
        allowed_token_ids: only these tokens can be sampled.
        structured_outputs: format that the output must match.
        output_kind: contents of the engine's outputs.
        best_of: number of generated sequences, of which the `n` with the highest cumulative log-probabilities
            are returned, the best first, once all have finished; None: `n`.
        thinking_token_budget: most tokens of a reasoning, without its tags; then its end is forced. None and
            −1: no limit. See `EngineConfig.reasoning_config`.
        extra_args: arguments for the engine's logit processors.
        text_end: where the text ends by what it says; what follows is cut off.  None: nowhere.

    Raises:
        ValueError: a setting is out of range or contradicts another.
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
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    text_end: TextEnd | None = None

    stop_strings: tuple[str, ...] = field(init=False, repr=False)
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        _check(self)
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.stop_strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def selects_best(self) -> bool:
        """True if more sequences are generated than returned."""
        return self.num_sequences > self.n

    @property
    def logprobs_needed(self) -> int | None:
        """`logprobs`, or 0 if only the sampled tokens' own are needed, to select the best sequences."""
        return 0 if self.logprobs is None and self.selects_best else self.logprobs

    def check_against_model(self, vocab_size: int, prompt_token_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model: the token ids of the settings and of a prompt.

        Raises:
            ValueError: a token id is out of range, or more log-probabilities are requested than there are
                tokens.
        """
        _check_against_model(self, vocab_size, prompt_token_ids)


def _check_number(name: str, value: Any, low: float, high: float, remedy: str, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, but it is {value!r}; {remedy}")
    if value < low or value > high or (above and value == low):
        raise ValueError(f"{name} is {value}; {remedy}")


def _check_integer(name: str, value: Any, least: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, but it is {value!r}; {remedy}")
    if value < least:
        raise ValueError(f"{name} is {value}; {remedy}")


def _check_texts(name: str, values: Iterable[Any]) -> None:
    for text in values:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} holds {text!r}; give texts of at least one character")


def _check_ids(name: str, values: Iterable[Any], most: int | None = None) -> None:
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} holds {token!r}; token ids are whole numbers from 0 on")
        if most is not None and token > most:
            raise ValueError(f"{name} holds token {token}, but the model's ids end at {most}")


def _check_lengths(params: SamplingParams) -> None:
    _check_integer("n", params.n, 1, "ask for at least one completion")
    if params.max_tokens is not None:
        _check_integer("max_tokens", params.max_tokens, 1, "allow at least one token, or None for no limit")
    _check_integer("min_tokens", params.min_tokens, 0, "give 0 or more")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, which is more than max_tokens = {params.max_tokens}; "
            "raise max_tokens"
        )
    if params.thinking_token_budget is not None:
        remedy = "give 0 or more, or -1 for no limit"
        _check_integer("thinking_token_budget", params.thinking_token_budget, -1, remedy)


def _check_filters(params: SamplingParams) -> None:
    most = 3e38  # the limit of float32, in which all of these are computed
    _check_number("temperature", params.temperature, 0, most, "give 0 (the most probable token) or more")
    _check_number("top_p", params.top_p, 0, 1, "give a number above 0 and at most 1 (all tokens)", above=True)
    _check_integer("top_k", params.top_k, -1, "give the number of tokens to sample from, 0 or -1 for all")
    _check_number("min_p", params.min_p, 0, 1, "give a fraction of the best token's probability, 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        _check_number(name, getattr(params, name), -2, 2, "give a number from -2 to 2")
    positive = "give a number above 0; 1 changes nothing"
    _check_number("repetition_penalty", params.repetition_penalty, 0, 1e30, positive, above=True)
    if params.repetition_penalty < 1e-30:
        raise ValueError(f"repetition_penalty is {params.repetition_penalty}; give at least 1e-30")
    if params.best_of is not None:
        _check_integer(
            "best_of", params.best_of, params.n, f"generate at least n = {params.n} sequences to choose from"
        )
    if params.num_sequences > 1 and params.temperature < 1e-5:
        name = "best_of" if params.selects_best else "n"
        raise ValueError(
            f"{name} is {params.num_sequences}, but temperature {params.temperature} makes all "
            "completions the same; raise the temperature or ask for one completion"
        )
    if params.seed is not None and (isinstance(params.seed, bool) or not isinstance(params.seed, int)):
        raise ValueError(f"seed must be a whole number or None, but it is {params.seed!r}")


def _check_tokens(params: SamplingParams) -> None:
    if params.stop is not None and not isinstance(params.stop, (str, list, tuple)):
        raise ValueError(f"stop must be a text or a list of texts, but it is {params.stop!r}")
    _check_texts("stop", [params.stop] if isinstance(params.stop, str) else params.stop or ())
    if params.stop and not params.detokenize:
        raise ValueError("stop texts need text: leave detokenize on, or use stop_token_ids")
    if isinstance(params.bad_words, str):
        raise ValueError(f"bad_words must be a list of texts, but it is {params.bad_words!r}")
    _check_texts("bad_words", params.bad_words or ())
    _check_ids("stop_token_ids", params.stop_token_ids or ())
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty; None allows all tokens")
        _check_ids("allowed_token_ids", params.allowed_token_ids)
    _check_ids("logit_bias", params.logit_bias or ())
    for token, bias in (params.logit_bias or {}).items():
        _check_number(f"the bias of token {token}", bias, -100, 100, "give a number from -100 to 100")
    if params.extra_args is not None and not (
        isinstance(params.extra_args, dict) and all(isinstance(name, str) for name in params.extra_args)
    ):
        raise ValueError(f"extra_args must be a dict with names, but it is {params.extra_args!r}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            remedy = "give the number of tokens per position, -1 for all, or None"
            _check_integer(name, getattr(params, name), -1, remedy)


def _check(params: SamplingParams) -> None:
    """Raises ValueError if a setting is out of range or contradicts another."""
    _check_lengths(params)
    _check_filters(params)
    _check_tokens(params)


def _check_against_model(
    params: SamplingParams, vocab_size: int, prompt_token_ids: Sequence[int] = ()
) -> None:
    """Raises ValueError if a token id is not the model's, or too many log-probabilities are requested."""
    last = vocab_size - 1
    if prompt_token_ids and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) <= last:
        _check_ids("the prompt", prompt_token_ids, last)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), last)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name} is {count}, but the model has {vocab_size} tokens; -1 returns all")


def _check_structured(params: StructuredOutputsParams) -> None:
    """Raises ValueError unless exactly one format is given, and it is not empty."""
    formats = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [name for name in formats if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        raise ValueError(
            f"structured outputs need exactly one of {', '.join(formats)}; got {', '.join(given) or 'none'}"
        )
    for name in ("regex", "grammar", "whitespace_pattern"):
        text = getattr(params, name)
        if text is not None and (not isinstance(text, str) or not text):
            raise ValueError(f"structured outputs: {name} is {text!r}; give a text")
    if params.choice is not None:
        if isinstance(params.choice, str) or not params.choice:
            raise ValueError(f"structured outputs: choice is {params.choice!r}; give a list of texts")
        _check_texts("choice", params.choice)
    if params.json is not None and not isinstance(params.json, (str, dict)):
        raise ValueError(f"structured outputs: json is {params.json!r}; give a schema as a text or a dict")
    check_size(given[0], getattr(params, given[0]))
    if params.whitespace_pattern is not None:
        if given[0] not in ("json", "json_object"):
            raise ValueError(
                f"structured outputs: whitespace_pattern is for json and json_object, not for {given[0]}"
            )
        check_size("regex", params.whitespace_pattern)
