"""Beam search: the most probable completions, found by keeping the best few at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams


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
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


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


def search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_token_ids: Sequence[int],
    best_next: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
    steps: Iterable[int],
) -> list[BeamSearchOutput]:
    """Searches completions of prompts.

    Args:
        prompts: their tokens.
        params: of the search.
        eos_token_ids: of the model.
        best_next: returns an output of one token, with log-probabilities, for each of a list of beams.
        steps: one item per token.

    Returns:
        One output per prompt, in order.
    """
    one = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False, ignore_eos=True
    )
    ends: frozenset[int] = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    searches = [_Search([BeamSearchSequence(list(prompt))]) for prompt in prompts]

    def score(beam: BeamSearchSequence) -> float:
        ended = beam.finish_reason == "stop" and params.include_stop_str_in_output
        length: float = (len(beam.tokens) - ended) ** params.length_penalty
        return beam.cum_logprob / length

    for _ in steps:
        beams = [beam for each in searches for beam in each.running]
        if not beams:
            break
        outputs = iter(best_next([beam.tokens for beam in beams], one))
        for each in searches:
            grown: list[BeamSearchSequence] = []
            for beam in each.running:
                (logprobs,) = next(outputs).outputs[0].logprobs or [{}]
                for token, found in logprobs.items():
                    total = beam.cum_logprob + found.logprob
                    if token in ends:
                        kept = [token] if params.include_stop_str_in_output else []
                        ended = BeamSearchSequence([*beam.tokens, *kept], total, finish_reason="stop")
                        each.finished.append(ended)
                    else:
                        grown.append(BeamSearchSequence([*beam.tokens, token], total))
            each.running = sorted(grown, key=score, reverse=True)[: params.beam_width]
    for each in searches:
        for beam in each.running:
            beam.finish_reason = "length"
        each.finished = sorted(each.finished + each.running, key=score, reverse=True)
    return [BeamSearchOutput(each.finished[: params.beam_width]) for each in searches]
