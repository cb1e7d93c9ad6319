"""Beam search: the most probable completions, found by keeping the best few at every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch_armllm.engine.outputs import CompletionOutput, FinishReason, Logprobs, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search; names, meaning and defaults are vLLM's.

    Attributes:
        beam_width: number of beams, and of returned sequences.
        max_tokens: maximum number of tokens to generate.
        ignore_eos: beams go on after the model's EOS token.
        temperature: 0 or 1; beams are ranked by the model's own probabilities.
        length_penalty: scores are log-probabilities divided by the length, prompt included, to this power.
        include_stop_str_in_output: keeps the EOS token.

    Raises:
        ValueError: a setting is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")
        if self.temperature not in (0.0, 1.0):
            raise ValueError(
                f"temperature = {self.temperature}: beams are ranked by the model's own probabilities; leave "
                "it out"
            )


@dataclass
class BeamSearchSequence:
    """A beam.

    Attributes:
        tokens: of prompt and completion.
        cum_logprob: sum of the log-probabilities of the completion's tokens.
        text: of prompt and completion; None without a tokenizer.
        finish_reason: ``stop`` after an EOS token, ``length`` after `BeamSearchParams.max_tokens`.
        logprobs: one entry per token of the completion.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[Logprobs] = field(default_factory=list, repr=False)


@dataclass
class BeamSearchOutput:
    """Completions of a prompt.

    Attributes:
        sequences: the best first.
    """

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    running: list[BeamSearchSequence]
    finished: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """A search for completions of prompts, whose steps somebody else computes.

    Args:
        prompts: their tokens.
        params: of the search.
        eos_token_ids: of the model.
        logprobs: number of best tokens to keep the log-probabilities of at each position.

    Attributes:
        step: parameters of the output of one token that each beam needs.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        logprobs: int = 0,
    ) -> None:
        count = max(2 * params.beam_width, logprobs)
        self.step = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=count,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._params = params
        self._ends: frozenset[int] = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._searches = [_Search([BeamSearchSequence(list(prompt))]) for prompt in prompts]

    @property
    def beams(self) -> list[list[int]]:
        """Tokens of the beams that grow."""
        return [beam.tokens for each in self._searches for beam in each.running]

    def advance(self, outputs: Iterable[RequestOutput]) -> None:
        """Lets the beams grow by the outputs of one token, with log-probabilities, for each of `beams`."""
        found = iter(outputs)
        width = self._params.beam_width
        for each in self._searches:
            grown: list[BeamSearchSequence] = []
            for beam in each.running:
                (logprobs,) = next(found).outputs[0].logprobs or [{}]
                best = sorted(logprobs, key=lambda token: -logprobs[token].logprob)[: 2 * width]
                for token in best:
                    if token in self._ends:
                        each.finished.append(self._ended(beam, token, logprobs))
                    else:
                        grown.append(_longer(beam, [token], token, logprobs))
            each.running = sorted(grown, key=self._score, reverse=True)[:width]

    def finish(self) -> list[BeamSearchOutput]:
        """Returns one output per prompt, in order."""
        for each in self._searches:
            for beam in each.running:
                beam.finish_reason = "length"
            each.finished = sorted(each.finished + each.running, key=self._score, reverse=True)
            each.running = []
        return [BeamSearchOutput(each.finished[: self._params.beam_width]) for each in self._searches]

    def _ended(self, beam: BeamSearchSequence, token: int, logprobs: Logprobs) -> BeamSearchSequence:
        ended = _longer(beam, [token] if self._params.include_stop_str_in_output else [], token, logprobs)
        ended.finish_reason = "stop"
        return ended

    def _score(self, beam: BeamSearchSequence) -> float:
        ended = beam.finish_reason == "stop" and self._params.include_stop_str_in_output
        length: float = (len(beam.tokens) - ended) ** self._params.length_penalty
        return beam.cum_logprob / length


def _longer(beam: BeamSearchSequence, added: list[int], token: int, logprobs: Logprobs) -> BeamSearchSequence:
    """Returns a beam with further tokens, and with the log-probability of the token that was found."""
    total = beam.cum_logprob + logprobs[token].logprob
    return BeamSearchSequence(
        [*beam.tokens, *added], total, logprobs=[*beam.logprobs, *([logprobs] if added else [])]
    )


def as_request_output(
    request_id: str,
    prompt: str | None,
    tokens: list[int],
    found: BeamSearchOutput,
    first: RequestOutput,
    decode: Callable[[list[int]], str] | None,
) -> RequestOutput:
    """Returns the beams of a prompt as completions.

    Args:
        request_id: of the request.
        prompt: its text, if one was given.
        tokens: of the prompt.
        found: the beams, the best first.
        first: output of the first step, whose times and cached tokens are the prompt's.
        decode: returns the text of tokens; None: there is no tokenizer.
    """
    before = "" if decode is None else decode(tokens)
    completions = []
    for index, beam in enumerate(found.sequences):
        text = "" if decode is None else decode(beam.tokens)
        added = beam.tokens[len(tokens) :]
        if decode is not None:  # a token's text may depend on those before it
            text = text[len(before) :] if text.startswith(before) else decode(added)
        completions.append(
            CompletionOutput(
                index, text, added, beam.cum_logprob, beam.logprobs, finish_reason=beam.finish_reason
            )
        )
    times = replace(first.metrics, finished_time=time.monotonic())
    return RequestOutput(request_id, prompt, tokens, None, completions, True, times, first.num_cached_tokens)
