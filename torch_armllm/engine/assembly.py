"""How a request's state becomes its output."""

from __future__ import annotations

from collections.abc import Callable

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.request import Answer, Request, Status
from torch_armllm.engine.sampling_params import RequestOutputKind


class Reported:
    """How much of an answer its outputs have held."""

    __slots__ = ("finished", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text = 0
        self.finished = False


class Assembler:
    """Makes outputs of the kind that a request asked for."""

    def __init__(self) -> None:
        self._reported: dict[Answer, Reported] = {}

    def forget(self, request: Request) -> None:
        """Lets go of what is kept for a request."""
        for answer in request.answers:
            self._reported.pop(answer, None)

    def output(self, request: Request, text_of: Callable[[Answer], str]) -> RequestOutput | None:
        """A request's output after a step, or None where its kind wants none yet.

        Args:
            request: what was worked on.
            text_of: gives an answer's text, as far as it may be shown.
        """
        kind = request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not request.finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        answers = [self._answer(answer, text_of(answer), delta) for answer in request.answers]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[answer for answer in answers if answer is not None],
            finished=request.finished,
            prompt_logprobs=request.prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
        )

    def _answer(self, answer: Answer, text: str, delta: bool) -> CompletionOutput | None:
        first, shown = 0, 0
        finished = answer.status is Status.FINISHED
        if delta:
            reported = self._reported.setdefault(answer, Reported())
            first, shown = reported.tokens, reported.text
            nothing_new = first == answer.output_length and shown == len(text)
            if nothing_new and reported.finished == finished:
                return None
            reported.tokens, reported.text, reported.finished = answer.output_length, len(text), finished
        wants_logprobs = answer.params.logprobs is not None
        return CompletionOutput(
            index=answer.index,
            text=text[shown:],
            token_ids=answer.token_ids[answer.prompt_length + first :],
            cumulative_logprob=answer.cumulative_logprob if wants_logprobs else None,
            logprobs=answer.logprobs[first:] if wants_logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
