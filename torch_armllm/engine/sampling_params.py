"""How a request wants its tokens drawn, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch_armllm.engine import sampling_checks


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
        sampling_checks.check_structured(self)


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

    stop_texts: tuple[str, ...] = field(init=False, repr=False)
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        sampling_checks.check(self)
        self.stop_texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def width(self) -> int:
        """Answers that are written."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether more answers are written than given."""
        return self.width > self.n

    @property
    def logprobs_needed(self) -> int | None:
        """`logprobs`, or 0 where the drawn tokens' own tell which answers are the best."""
        return 0 if self.logprobs is None and self.chooses else self.logprobs

    def check_for(self, vocab_size: int, prompt_token_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model: the token ids of the settings and of a prompt.

        Raises:
            ValueError: an id is not below ``vocab_size``, or more log-probabilities than that are wanted.
        """
        sampling_checks.check_for(self, vocab_size, prompt_token_ids)
